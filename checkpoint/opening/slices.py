"""Answers the one question of every reader: this slice of this tensor, in this dtype, on this device.

Files are read with positioned reads: the pages of a mapped file (``mapped``) count as the process's resident memory, and a
rank must stay near the size of its own slices. Exactly the bytes of the slice are read, one read for each stretch that is
contiguous in the file, straight into the result where dtype, device and order allow, else through a buffer of ``CAST_BYTES``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from checkpoint.dtypes import TORCH_DTYPES
from checkpoint.errors import CheckpointError
from checkpoint.layout import Coded, LowRank, Piece, Stored

CHUNK_BYTES = 16 << 20
"""A tensor that is computed is computed in pieces of this size. The scratch of one is at most four times this."""

CAST_BYTES = 1 << 20
"""Size of the buffer for casts, copies to a device and changes of order: so little stays in a core's cache until it is cast."""

_GROUP = 32
"""Numbers of MXFP4 that share a scale."""

_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of four bits, one for sign, two for the exponent and one for the fraction, in the order of their codes."""

_SCRATCH_BYTES = 16
"""What decoding one of them takes at most, with what it is decoded from and to."""


@dataclass(frozen=True, slots=True)
class _Region:
    """Elements of a file at fixed strides, longest stride first."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset_bytes: int
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        total = self.item_bytes
        for size in self.shape:
            total *= size
        return total

    def narrow(self, start: int, stop: int) -> _Region:
        """Rows ``[start, stop)`` of the first dimension."""
        offset = self.offset_bytes + start * self.strides[0] * self.item_bytes
        return _Region((stop - start, *self.shape[1:]), self.strides, offset, self.item_bytes)

    def row(self, number: int) -> _Region:
        """One row of the first dimension, which is dropped."""
        offset = self.offset_bytes + number * self.strides[0] * self.item_bytes
        return _Region(self.shape[1:], self.strides[1:], offset, self.item_bytes)


def read_stored(
    files: Mapping[str, int],
    stored: Stored,
    index: tuple[slice, ...] | None,
    *,
    dtype: torch.dtype | None,
    device: str | torch.device,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, int]:
    """Read ``tensor[index]`` into a new contiguous tensor, or into ``out``.

    Args:
        files: descriptors by file name, open for reading; their positions are neither used nor moved, so that threads may share
            them.
        stored: where the whole tensor lies.
        index: slices of step 1, at most one for each dimension; the rest is taken whole. ``None`` takes all.
        dtype: what to cast to; ``None`` keeps the stored dtype.
        device: where a new tensor is.
        out: what to fill instead, of the slice's shape and with any strides; its own dtype and device count then.

    Returns:
        the tensor, and how many bytes were read for it.

    Raises:
        ValueError: ``index`` has too many entries or a step other than 1, or ``out`` is of another shape.
        CheckpointError: a file ends early or cannot be read.
    """
    starts, shape = resolve_index(stored.shape, index)
    kept = TORCH_DTYPES[stored.dtype]
    if out is None:
        out = torch.empty(shape, dtype=dtype or kept, device=device)
    elif out.shape != shape:
        raise ValueError(f"out is {list(out.shape)}; the slice is {list(shape)}")
    if out.numel() == 0:
        return out, 0
    if stored.added is not None:
        return out, _read_adapted(files, dataclasses.replace(stored, added=None), stored.added, starts, out)
    if stored.coded is not None:
        return out, _read_coded(files, stored.coded, starts, out)
    if stored.merge == "boxes":
        return out, sum(_read_piece(files, piece, starts, out) for piece in stored.pieces)
    # Copies are added in a type that loses nothing of them, and made the wanted type once.
    total = torch.zeros(shape, dtype=torch.promote_types(kept, torch.float32), device=out.device)
    part = torch.empty(shape, dtype=total.dtype, device=out.device)
    num_bytes = 0
    for piece in stored.pieces:
        num_bytes += _read_piece(files, piece, starts, part)
        total += part
    out.copy_(total.div_(len(stored.pieces)) if stored.merge == "mean" else total)
    return out, num_bytes


def _read_adapted(files: Mapping[str, int], base: Stored, added: LowRank, starts: tuple[int, ...], out: torch.Tensor) -> int:
    """Fill ``out``, the box at ``starts``, with ``base`` and what an adapter adds to it; returns the bytes read.

    In blocks of rows of bounded size. A norm is over whole rows or columns of the tensor, so that those are read of which the
    box has an entry.
    """
    read = _Sum(files, base, added)
    rows, columns = ((start, start + size) for start, size in zip(starts, out.shape, strict=True))
    by_row = added.magnitude is not None and added.magnitude_dim == 0
    wide = (0, base.shape[1]) if by_row else columns
    factor: torch.Tensor | None = None
    if added.magnitude is not None and not by_row:
        squares = torch.zeros(columns[1] - columns[0], dtype=torch.float64)
        for _, block in read.blocks((0, base.shape[0]), columns):
            squares += block.double().square().sum(dim=0)
        factor = read.magnitude(columns) / squares.sqrt()
    for first, block in read.blocks(rows, wide):
        if by_row:
            part = read.magnitude((first, first + len(block))) / block.double().square().sum(dim=1).sqrt()
            block = block[:, columns[0] : columns[1]] * part[:, None].to(block.dtype)
        elif factor is not None:
            block = block * factor.to(block.dtype)
        out[first - rows[0] :][: len(block)].copy_(block)
    return read.num_bytes


class _Sum:
    """Blocks of the sum of a tensor and an adapter's product, and the bytes that were read for them."""

    def __init__(self, files: Mapping[str, int], base: Stored, added: LowRank) -> None:
        self._files, self._base, self._added = files, base, added
        self._dtype = torch.promote_types(TORCH_DTYPES[base.dtype], torch.float32)
        self.num_bytes = 0

    def blocks(self, rows: tuple[int, int], columns: tuple[int, int]) -> Iterator[tuple[int, torch.Tensor]]:
        """First row and content of each block of these rows and columns."""
        right = self._read(self._added.right, (slice(None), slice(*columns)))
        most = max(1, CHUNK_BYTES // (self._dtype.itemsize * (columns[1] - columns[0])))
        for first in range(rows[0], rows[1], most):
            part = slice(first, min(rows[1], first + most))
            left = self._read(self._added.left, (part, slice(None)))
            yield first, self._read(self._base, (part, slice(*columns))).addmm_(left, right, alpha=self._added.scale)

    def magnitude(self, entries: tuple[int, int]) -> torch.Tensor:
        """The norms that these entries shall have."""
        stored = self._added.magnitude
        assert stored is not None
        return self._read(stored, None).flatten()[entries[0] : entries[1]].double()

    def _read(self, stored: Stored, index: tuple[slice, ...] | None) -> torch.Tensor:
        tensor, num_bytes = read_stored(self._files, stored, index, dtype=self._dtype, device="cpu")
        self.num_bytes += num_bytes
        return tensor


def _read_coded(files: Mapping[str, int], coded: Coded, starts: tuple[int, ...], out: torch.Tensor) -> int:
    """Fill ``out``, the box at ``starts``, with what it is decoded to, in blocks of bounded size; returns the bytes read.

    Whole groups are read, of which the box may begin or end inside one.
    """
    num_bytes = 0
    first, low, column = starts
    experts, inputs, outputs = out.shape
    groups = slice(low // _GROUP, -(-(low + inputs) // _GROUP))
    inside = slice(low - groups.start * _GROUP, low - groups.start * _GROUP + inputs)
    most = max(1, CHUNK_BYTES // ((groups.stop - groups.start) * _GROUP * _SCRATCH_BYTES))
    for expert in range(experts):
        for begin in range(0, outputs, most):
            end = min(outputs, begin + most)
            index = (slice(first + expert, first + expert + 1), slice(column + begin, column + end), groups)
            codes_1OGB, codes_bytes = read_stored(files, coded.codes, index, dtype=None, device="cpu")
            scales_1OG, scales_bytes = read_stored(files, coded.scales, index, dtype=None, device="cpu")
            out[expert, :, begin:end].copy_(_decode(codes_1OGB[0], scales_1OG[0])[:, inside].t())
            num_bytes += codes_bytes + scales_bytes
    return num_bytes


def _decode(codes_OGB: torch.Tensor, scales_OG: torch.Tensor) -> torch.Tensor:
    """Numbers of four bits and the exponents of their groups as bf16 [O, 32 G], which holds all of them exactly."""
    halves_OGB2 = torch.stack((codes_OGB & 15, codes_OGB >> 4), dim=-1)
    numbers_OGI = torch.tensor(_FOUR_BITS, dtype=torch.bfloat16)[halves_OGB2.int()].flatten(2)
    return torch.ldexp(numbers_OGI, scales_OG[..., None].int() - 127).to(torch.bfloat16).flatten(1)


def _read_piece(files: Mapping[str, int], piece: Piece, starts: tuple[int, ...], out: torch.Tensor) -> int:
    """Read what a piece has of the box at ``starts`` of the tensor, which ``out`` is; returns the bytes read."""
    extent, target, offset = piece.extent, out, piece.extent.offset_bytes
    for dim, (first, last, start, stride) in enumerate(zip(piece.start, piece.stop, starts, extent.strides, strict=True)):
        low, high = max(first, start), min(last, start + out.shape[dim])
        if low >= high:
            return 0
        target = target.narrow(dim, low - start, high - low)
        offset += (low - first) * stride * extent.item_bytes
    shape = target.shape
    order = sorted(range(len(shape)), key=lambda d: -extent.strides[d] if shape[d] > 1 else 0)
    region = _Region(tuple(shape[d] for d in order), tuple(extent.strides[d] for d in order), offset, extent.item_bytes)
    target, kept = target.permute(order), TORCH_DTYPES[extent.dtype]
    if out.dtype == kept and out.device.type == "cpu" and target.is_contiguous():
        # Of a dimension of one element any stride counts as contiguous, and a view of bytes takes none but 1.
        _read_region(files[piece.file], piece.file, region, target.as_strided((target.numel(),), (1,)))
    else:
        buffer = torch.empty(min(CAST_BYTES, region.num_bytes) // extent.item_bytes, dtype=kept)
        _fill(files[piece.file], piece.file, region, target, buffer)
    return region.num_bytes


def resolve_index(shape: tuple[int, ...], index: tuple[slice, ...] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First element and shape of ``tensor[index]``, with Python's rules for open, negative and overlong bounds."""
    if not isinstance(index, tuple | list | None):  # one slice alone is not one of the first dimension
        raise ValueError(f"index is {index!r}; it must be a tuple of slices")
    index = () if index is None else tuple(index)
    if len(index) > len(shape):
        raise ValueError(f"index has {len(index)} slices; the tensor has {len(shape)} dimensions")
    starts: list[int] = []
    sizes: list[int] = []
    for dim, size in enumerate(shape):
        part = index[dim] if dim < len(index) else slice(None)
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise ValueError(f"index[{dim}] is {part!r}; it must be a slice of step 1")
        start, stop, _ = part.indices(size)
        starts.append(start)
        sizes.append(max(0, stop - start))
    return tuple(starts), tuple(sizes)


def _fill(fd: int, file: str, region: _Region, target: torch.Tensor, buffer: torch.Tensor) -> None:
    """Read ``region`` into ``target`` of the same shape, at most one buffer at a time."""
    count = target.numel()
    if count <= buffer.numel():
        part = buffer[:count]
        _read_region(fd, file, region, part)
        target.copy_(part.view(target.shape))
        return
    row_items = count // region.shape[0]
    rows = buffer.numel() // row_items
    if rows == 0:
        for number in range(region.shape[0]):
            _fill(fd, file, region.row(number), target[number], buffer)
        return
    for start in range(0, region.shape[0], rows):
        stop = min(start + rows, region.shape[0])
        _fill(fd, file, region.narrow(start, stop), target[start:stop], buffer)


def _read_region(fd: int, file: str, region: _Region, flat: torch.Tensor) -> None:
    """Read ``region`` in its own order into ``flat``, a contiguous CPU tensor of the stored dtype."""
    run_bytes, outer = _runs(region)
    with flat.view(torch.uint8).numpy().data as view:
        place = 0
        for offset in _offsets(region.offset_bytes, outer):
            _read_into(fd, file, view[place : place + run_bytes], offset)
            place += run_bytes


def _runs(region: _Region) -> tuple[int, list[tuple[int, int]]]:
    """Length in bytes of the contiguous stretches, and the (count, stride in bytes) pairs that place them."""
    run_items = 1
    outer: list[tuple[int, int]] = []
    for size, stride in zip(reversed(region.shape), reversed(region.strides), strict=True):
        if size == 1:
            continue
        if not outer and stride == run_items:
            run_items *= size
        elif outer and stride == outer[0][0] * outer[0][1]:
            outer[0] = (outer[0][0] * size, outer[0][1])
        else:
            outer.insert(0, (size, stride))
    return run_items * region.item_bytes, [(size, stride * region.item_bytes) for size, stride in outer]


def _offsets(base: int, outer: list[tuple[int, int]]) -> Iterator[int]:
    """File offsets of the stretches, in order."""
    if not outer:
        yield base
        return
    size, stride = outer[0]
    starts = range(base, base + size * stride, stride)
    if len(outer) == 1:
        yield from starts
        return
    for start in starts:
        yield from _offsets(start, outer[1:])


def _read_into(fd: int, file: str, view: memoryview, offset: int) -> None:
    """Fill ``view`` from ``offset``; the kernel may give less than asked, so ask until all is there."""
    while len(view) > 0:
        try:
            got = os.preadv(fd, [view], offset)
        except OSError as error:
            raise CheckpointError(file, f"reading at byte {offset} failed: {error.strerror}") from error
        if got == 0:
            raise CheckpointError(file, f"ends at byte {offset}, before the tensor does; it was cut after it was opened")
        view = view[got:]
        offset += got
