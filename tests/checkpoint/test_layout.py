"""Tensors that lie in pieces: in boxes of several files, in stretches of flat ones, as copies to be added."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoint.errors import CheckpointError
from checkpoint.layout import Extent, Piece, Stored, contiguous_strides, copies, cover_fault, flat_boxes, joined, whole
from checkpoint.opening.slices import read_stored

SHAPES = [(), (7,), (1, 1), (5, 4), (3, 1, 6), (2, 3, 4, 5)]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[dict[str, int]]:
    """Descriptors of files that ``put`` writes."""
    opened: dict[str, int] = {}
    yield opened
    for fd in opened.values():
        os.close(fd)


def put(files: dict[str, int], folder: Path, name: str, tensor: torch.Tensor, before: int = 0) -> Extent:
    """Write ``tensor`` row-major to a file of its own, after ``before`` bytes of something else."""
    data = tensor.contiguous().numpy().tobytes()
    (folder / name).write_bytes(b"\xff" * before + data + b"\xff" * 3)
    files[name] = os.open(folder / name, os.O_RDONLY)
    return Extent("F32", tuple(tensor.shape), contiguous_strides(tuple(tensor.shape)), before)


def numbers(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def read(files: dict[str, int], stored: Stored, index: tuple[slice, ...] | None = None) -> torch.Tensor:
    return read_stored(files, stored, index, dtype=None, device="cpu")[0]


def some_slices(shape: tuple[int, ...], chance: random.Random) -> tuple[slice, ...]:
    return tuple(slice(*sorted((chance.randint(0, n), chance.randint(0, n)))) for n in shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cuts", [1, 2, 5])
def test_a_flat_tensor_cut_anywhere_reads_as_the_whole_one(
    shape: tuple[int, ...], cuts: int, files: dict[str, int], tmp_path: Path
) -> None:
    chance = random.Random(f"{shape} {cuts}")
    tensor = numbers(shape)
    count = tensor.numel()
    bounds = sorted({0, count, *(chance.randint(0, count) for _ in range(cuts - 1))})
    pieces: list[Piece] = []
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        extent = put(files, tmp_path, f"{number}", tensor.reshape(-1)[first:last], before=number)
        pieces += flat_boxes(shape, first, f"{number}", "F32", extent.offset_bytes, last - first)
    stored = Stored("F32", shape, tuple(pieces))
    assert cover_fault(stored) is None
    assert torch.equal(read(files, stored), tensor)
    for _ in range(10):
        index = some_slices(shape, chance)
        found, num_bytes = read_stored(files, stored, index, dtype=None, device="cpu")
        assert torch.equal(found, tensor[index])
        assert num_bytes == 4 * found.numel(), "no byte is read that is not of the slice"


def test_boxes_in_any_order_and_any_stride_read_as_one_tensor(files: dict[str, int], tmp_path: Path) -> None:
    tensor = numbers((9, 8))
    left = put(files, tmp_path, "left", tensor[:, :3])
    right = put(files, tmp_path, "right", tensor[:, 3:].t()).transposed()
    stored = Stored("F32", (9, 8), (Piece("right", right, (0, 3)), Piece("left", left, (0, 0))))
    assert cover_fault(stored) is None
    assert torch.equal(read(files, stored), tensor)
    assert torch.equal(read(files, stored, (slice(2, 7), slice(1, 5))), tensor[2:7, 1:5])
    as_bf16, _ = read_stored(files, stored, (slice(1, 9),), dtype=torch.bfloat16, device="cpu")
    assert torch.equal(as_bf16, tensor[1:].to(torch.bfloat16))


def test_rows_of_every_other_kind_are_taken_by_their_strides(files: dict[str, int], tmp_path: Path) -> None:
    """Pairs that lie beside each other, wanted half by half."""
    tensor = numbers((8, 5))
    extent = put(files, tmp_path, "pairs", tensor)
    stored = joined(0, [("pairs", extent.narrow(0, 0, 8, 2)), ("pairs", extent.narrow(0, 1, 8, 2))])
    assert torch.equal(read(files, stored), torch.cat([tensor[0::2], tensor[1::2]]))
    split = extent.split(0, (2, 4)).narrow(0, 1, 2)
    assert torch.equal(read(files, whole("pairs", split)), tensor.view(2, 4, 5)[1:2])
    assert torch.equal(read(files, stored.rows(3, 6)), torch.cat([tensor[0::2], tensor[1::2]])[3:6])


@pytest.mark.parametrize("merge", ["sum", "mean"])
def test_copies_are_added_or_averaged(merge: str, files: dict[str, int], tmp_path: Path) -> None:
    ranks = [numbers((6, 3), seed) for seed in range(4)]
    parts = [(str(n), put(files, tmp_path, str(n), rank)) for n, rank in enumerate(ranks)]
    stored = copies("sum" if merge == "sum" else "mean", parts)
    assert cover_fault(stored) is None
    expected = sum(ranks) if merge == "sum" else sum(ranks) / 4
    assert torch.equal(read(files, stored, (slice(1, 4),)), expected[1:4])
    assert copies("sum", parts[:1]).merge == "boxes", "one copy is the tensor itself"


def test_what_does_not_cover_a_tensor_once_is_told() -> None:
    def box(file: str, start: tuple[int, ...], shape: tuple[int, ...], dtype: str = "F32") -> Piece:
        return Piece(file, Extent(dtype, shape, contiguous_strides(shape), 0), start)

    def fault(*pieces: Piece) -> str:
        found = cover_fault(Stored("F32", (4, 4), pieces))
        assert found is not None
        return found

    assert "hold 8 of 16 elements" in fault(box("a", (0, 0), (2, 4)))
    assert fault(box("a", (0, 0), (3, 4)), box("b", (2, 0), (2, 4))) == "pieces of a and b overlap at [2, 0]"
    assert "leaves the tensor" in fault(box("a", (1, 0), (4, 4)))
    assert "is of F16, the tensor of F32" in fault(box("a", (0, 0), (4, 4), "F16"))
    columns = [box(str(n), (0, n), (4, 1)) for n in range(4)]
    assert cover_fault(Stored("F32", (4, 4), tuple(columns))) is None
    assert "overlap" in fault(*columns, box("more", (3, 3), (1, 1)))


def test_parts_that_do_not_join_are_no_tensor() -> None:
    def extent(*shape: int) -> Extent:
        return Extent("F32", shape, contiguous_strides(shape), 0)

    with pytest.raises(ValueError, match=r"F32 \[2, 3\] and F32 \[2, 4\] do not join at 0"):
        joined(0, [("a", extent(2, 3)), ("b", extent(2, 4))])
    with pytest.raises(ValueError, match="at least one part"):
        joined(0, [])
    with pytest.raises(ValueError, match="have no sum"):
        copies("sum", [("a", extent(2)), ("b", extent(3))])
    with pytest.raises(ValueError, match="entries 2 to 5"):
        extent(4, 2).narrow(0, 2, 5)
    with pytest.raises(ValueError, match="not \\(3, 2\\)"):
        extent(4, 2).split(0, (3, 2))


def test_a_piece_that_was_cut_off_names_its_file(files: dict[str, int], tmp_path: Path) -> None:
    extent = put(files, tmp_path, "short", numbers((4, 4)))
    os.truncate(tmp_path / "short", 40)
    with pytest.raises(CheckpointError, match="short: ends at byte 40"):
        read(files, whole("short", extent))


@pytest.mark.parametrize("dim", [0, 1])
def test_thousands_of_pieces_along_either_dimension_are_proved_to_lie_apart(dim: int) -> None:
    count = 6000  # comparing each with each would take a minute
    shape = (1, 2) if dim == 0 else (2, 1)
    starts = [(number, 0) if dim == 0 else (0, number) for number in range(count)]
    pieces = tuple(Piece("a", Extent("F32", shape, (1, 1), 0), start) for start in starts)
    whole_shape = (count, 2) if dim == 0 else (2, count)
    assert cover_fault(Stored("F32", whole_shape, pieces)) is None
    fault = cover_fault(Stored("F32", whole_shape, (*pieces[:-1], pieces[17])))
    assert fault is not None
    assert "overlap" in fault
