"""Where a tensor's elements lie in files.

Every format comes down to the same thing: a tensor is made of boxes, and the elements of a box are of one dtype at fixed
strides from a byte offset in one file. A reader's work is to find these places and to prove them sound; ``slices`` does the
reading for all of them. Nothing here needs torch: a process that only looks at a checkpoint is spared its seconds of import.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

DTYPE_BYTES: dict[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of one element, by the safetensors format's names of the dtypes that Tessera keeps."""

MAX_DIMENSIONS = 16
"""A tensor has at most so many; models have up to five."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of one stored tensor before it is read."""

    name: str
    """The name in the file, which may differ from the model's; see ``Checkpoint.resolve``."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    """The file's name inside the checkpoint's folder."""
    adapted: bool = False
    """Whether an adapter adds to it: then reading a part may cost more than the part's share of the whole."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The place of one tensor's elements in its file."""

    dtype: str
    """A key of ``DTYPE_BYTES``."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, one for each dimension, never negative, and never 0 where the dimension is longer than 1."""
    offset_bytes: int
    """From the start of the file to element (0, …, 0)."""

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def num_elements(self) -> int:
        """Elements of the whole extent."""
        return math.prod(self.shape)

    def narrow(self, dim: int, start: int, stop: int, step: int = 1) -> Extent:
        """Every ``step``-th of the entries ``[start, stop)`` of dimension ``dim``.

        Raises:
            ValueError: the range is empty or leaves the extent.
        """
        if not 0 <= start < stop <= self.shape[dim] or step < 1:
            raise ValueError(f"entries {start} to {stop}, each {step}, of dimension {dim}; it has {self.shape[dim]}")
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = -(-(stop - start) // step), strides[dim] * step
        offset = self.offset_bytes + start * self.strides[dim] * self.item_bytes
        return Extent(self.dtype, tuple(shape), tuple(strides), offset)

    def transposed(self) -> Extent:
        """The elements with the order of the dimensions turned round; nothing is read or moved."""
        return dataclasses.replace(self, shape=self.shape[::-1], strides=self.strides[::-1])

    def split(self, dim: int, sizes: tuple[int, ...]) -> Extent:
        """Dimension ``dim`` as several, of ``sizes``, the last of which runs fastest.

        Raises:
            ValueError: the product of ``sizes`` is not the dimension's.
        """
        if math.prod(sizes) != self.shape[dim]:
            raise ValueError(f"dimension {dim} has {self.shape[dim]} entries, which are not {sizes}")
        stride = self.strides[dim]
        inner = tuple(stride * step for step in contiguous_strides(sizes))
        shape = (*self.shape[:dim], *sizes, *self.shape[dim + 1 :])
        return dataclasses.replace(self, shape=shape, strides=(*self.strides[:dim], *inner, *self.strides[dim + 1 :]))


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, whole or in part, and where its elements lie."""

    file: str
    """The file's name inside the checkpoint's folder; in a folder below that one, the path to it."""
    extent: Extent
    """The place of the box's elements in the file; its shape is the box's."""
    start: tuple[int, ...]
    """The box's first element, by its place in the tensor."""

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the box's last entry, for each dimension."""
        return tuple(a + n for a, n in zip(self.start, self.extent.shape, strict=True))


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a tensor of two dimensions: ``scale`` times the product of two factors."""

    left: Stored
    """[rows of the tensor, rank]."""
    right: Stored
    """[rank, columns of the tensor]."""
    scale: float
    magnitude: Stored | None = None
    """One number for each entry of ``magnitude_dim``: the norm that the sum has there, over the other dimension (DoRA). As many
    elements in one dimension or two."""
    magnitude_dim: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that reading all of it takes from the files."""
        return sum(part.num_bytes for part in (self.left, self.right, self.magnitude) if part is not None)


@dataclass(frozen=True, slots=True)
class Coded:
    """What a tensor of three dimensions [E, I, O] is decoded from (MXFP4, OCP Microscaling Formats 1.0): numbers of four bits
    that share a power of two by thirty-two along I."""

    codes: Stored
    """Bytes [E, O, I / 32, 16], each of two numbers, the first in the lower half."""
    scales: Stored
    """Bytes [E, O, I / 32]: 127 more than the exponent of two."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one tensor lies."""

    dtype: str
    """A key of ``DTYPE_BYTES``: the dtype of every piece."""
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    merge: Literal["boxes", "sum", "mean"] = "boxes"
    """``boxes``: the pieces cover the tensor without hole or overlap. ``sum`` and ``mean``: each is a whole tensor, and the
    tensor is what they add up to, or their average, computed in float32 or better."""
    added: LowRank | None = None
    """What an adapter adds, in float32 or better; the sum is cast once."""
    coded: Coded | None = None
    """What the tensor is decoded from, of whose codes the pieces are then; ``dtype`` and ``shape`` are of what results."""

    @property
    def file(self) -> str:
        """The file that a message about this tensor names: that of the first piece."""
        return self.pieces[0].file

    @property
    def num_bytes(self) -> int:
        """Bytes that reading the whole tensor takes from the files."""
        own = sum(piece.extent.num_elements * piece.extent.item_bytes for piece in self.pieces)
        scales = 0 if self.coded is None else self.coded.scales.num_bytes
        return own + scales + (0 if self.added is None else self.added.num_bytes)

    def moved(self, files: Mapping[str, str]) -> Stored:
        """This place by other names of its files, as where two folders' files are read together.

        Args:
            files: the new name of each file.
        """
        assert self.added is None, "what lies in files is moved before anything is added to it"
        assert self.coded is None, "only plain tensors are moved"
        return dataclasses.replace(
            self, pieces=tuple(dataclasses.replace(piece, file=files[piece.file]) for piece in self.pieces)
        )

    def rows(self, start: int, stop: int) -> Stored:
        """Rows ``[start, stop)`` of the first dimension, as a tensor of its own; without what an adapter adds."""
        assert self.coded is None, "a tensor that is decoded is read in slices, not taken apart"
        kept: list[Piece] = []
        for piece in self.pieces:
            first = piece.start[0]
            low, high = max(start, first), min(stop, piece.stop[0])
            if low < high:
                kept.append(
                    Piece(piece.file, piece.extent.narrow(0, low - first, high - first), (low - start, *piece.start[1:]))
                )
        return Stored(self.dtype, (stop - start, *self.shape[1:]), tuple(kept), self.merge)

    def picked(self, runs: Sequence[range]) -> Stored:
        """The rows of ``runs``, in their order, as a tensor of its own: for rows that a trainer orders otherwise.

        Args:
            runs: rows of the first dimension, each with a step of 1 or more.
        """
        kept: list[Piece] = []
        reached = 0
        for run in runs:
            for piece in self.pieces:
                first, stop = piece.start[0], piece.stop[0]
                skipped = max(0, -(-(first - run.start) // run.step))
                rows = run[skipped:]
                rows = rows[: max(0, -(-(min(run.stop, stop) - rows.start) // run.step))] if rows else rows
                if rows:
                    extent = piece.extent.narrow(0, rows[0] - first, rows[-1] + 1 - first, run.step)
                    kept.append(Piece(piece.file, extent, (reached + skipped, *piece.start[1:])))
            reached += len(run)
        return Stored(self.dtype, (reached, *self.shape[1:]), tuple(kept), self.merge)


def whole(file: str, extent: Extent) -> Stored:
    """A tensor that lies in one place."""
    return Stored(extent.dtype, extent.shape, (Piece(file, extent, (0,) * len(extent.shape)),))


def joined(dim: int, parts: Sequence[tuple[str, Extent]]) -> Stored:
    """A tensor of ``parts``, each a file and an extent, one after the other along ``dim``.

    Raises:
        ValueError: there are none, or they differ in dtype or in another dimension than ``dim``.
    """
    first = parts[0][1] if parts else None
    if first is None:
        raise ValueError("a tensor has at least one part")
    reached = 0
    pieces: list[Piece] = []
    for file, extent in parts:
        others = [n for d, n in enumerate(extent.shape) if d != dim]
        if extent.dtype != first.dtype or others != [n for d, n in enumerate(first.shape) if d != dim]:
            raise ValueError(
                f"parts of {first.dtype} {list(first.shape)} and {extent.dtype} {list(extent.shape)} do not join at {dim}"
            )
        pieces.append(Piece(file, extent, tuple(reached if d == dim else 0 for d in range(len(extent.shape)))))
        reached += extent.shape[dim]
    shape = tuple(reached if d == dim else n for d, n in enumerate(first.shape))
    return Stored(first.dtype, shape, tuple(pieces))


def copies(merge: Literal["sum", "mean"], parts: Sequence[tuple[str, Extent]]) -> Stored:
    """A tensor that is the sum or the average of ``parts``, each a file and an extent of the tensor's shape.

    Raises:
        ValueError: there are none, or they differ in dtype or shape.
    """
    if not parts or any((e.dtype, e.shape) != (parts[0][1].dtype, parts[0][1].shape) for _, e in parts):
        raise ValueError(f"{len(parts)} parts of different dtype or shape have no {merge}")
    first = parts[0][1]
    pieces = tuple(Piece(file, extent, (0,) * len(extent.shape)) for file, extent in parts)
    return Stored(first.dtype, first.shape, pieces, merge if len(pieces) > 1 else "boxes")


def flat_boxes(shape: tuple[int, ...], first: int, file: str, dtype: str, offset_bytes: int, count: int) -> list[Piece]:
    """The boxes of the elements ``[first, first + count)`` of a row-major tensor of ``shape``, which lie in a row in ``file``.

    An interval of whole rows is one box; each end that is inside a row adds at most one more for each dimension.
    """
    if not shape:
        return [Piece(file, Extent(dtype, (), (), offset_bytes), ())] if count else []
    found: list[Piece] = []
    item = DTYPE_BYTES[dtype]
    row = math.prod(shape[1:])
    place, end = first, first + count
    while place < end:
        number, inside = divmod(place, row)
        if inside == 0 and end - place >= row:
            rows = (end - place) // row
            box = (rows, *shape[1:])
            start = (number, *(0 for _ in shape[1:]))
            found.append(Piece(file, Extent(dtype, box, contiguous_strides(box), offset_bytes), start))
            taken = rows * row
        else:
            taken = min(row - inside, end - place)
            for piece in flat_boxes(shape[1:], inside, file, dtype, offset_bytes, taken):
                extent = dataclasses.replace(piece.extent, shape=(1, *piece.extent.shape), strides=(row, *piece.extent.strides))
                found.append(Piece(file, extent, (number, *piece.start)))
        place += taken
        offset_bytes += taken * item
    return found


def cover_fault(stored: Stored) -> str | None:
    """What keeps the pieces from covering the tensor once; ``None`` where nothing does. Their dtypes must be the tensor's."""
    shape = stored.shape
    for piece in stored.pieces:
        if piece.extent.dtype != stored.dtype:
            return f"a piece of {piece.file} is of {piece.extent.dtype}, the tensor of {stored.dtype}"
        if len(piece.start) != len(shape) or any(
            a < 0 or b > n for a, b, n in zip(piece.start, piece.stop, shape, strict=True)
        ):
            return f"a piece of {piece.file} from {list(piece.start)} to {list(piece.stop)} leaves the tensor of {list(shape)}"
        if stored.merge != "boxes" and piece.extent.shape != shape:
            return f"a copy in {piece.file} has shape {list(piece.extent.shape)}, the tensor {list(shape)}"
    if stored.merge != "boxes":
        return None if stored.pieces else "there is no piece"
    held = sum(piece.extent.num_elements for piece in stored.pieces)
    overlap = _overlap(stored.pieces)
    if overlap is not None:
        return f"pieces of {overlap[0].file} and {overlap[1].file} overlap at {list(overlap[1].start)}"
    return None if held == math.prod(shape) else f"its pieces hold {held} of {math.prod(shape)} elements"


def _overlap(pieces: Sequence[Piece]) -> tuple[Piece, Piece] | None:
    """Two pieces that share an element, found along the dimension that most pieces begin apart in: few reach far there."""
    dims = range(len(pieces[0].start)) if pieces else range(0)
    along = max(dims, key=lambda dim: len({piece.start[dim] for piece in pieces}), default=0)
    reaching: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.start[along : along + 1]):
        reaching = [other for other in reaching if not other.start or other.stop[along] > piece.start[along]]
        for other in reaching:
            bounds = zip(piece.start, piece.stop, other.start, other.stop, strict=True)
            if all(a < d and c < b for a, b, c, d in bounds):
                return other, piece
        reaching.append(piece)
    return None


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a row-major tensor of ``shape``."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def zero_size_rule(name: str, shape: tuple[int, ...]) -> str:
    """The sentence for a tensor without elements: nearly always what is left of a model saved without gathering it."""
    return (
        f"tensor {name!r} has shape {list(shape)} and holds no element; saving a model under ZeRO-3 without gathering its "
        "parameters leaves such empty tensors: export the weights again with the parameters gathered"
    )
