"""A slice as it lies in its file: what reading it gives, without a copy, until it is given up or given memory of its own."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import Checkpoint, CheckpointError, open_checkpoint
from checkpoint.opening import mapped
from tests.checkpoint.folders import plain_folder

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def is_mapped(folder: Path) -> bool:
    return str(folder.resolve()) in Path("/proc/self/maps").read_text()


def viewed(checkpoint: Checkpoint, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
    found = checkpoint.view(name, index, dtype=checkpoint.tensors[name].dtype)
    assert found is not None
    return found


def kept(view: torch.Tensor) -> int:
    """In how many parts it was given its own memory."""
    return sum(1 for _ in mapped.keep(view))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_view_is_what_a_read_gives(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 2000)))
    tensor = torch.randn(shape).to(data.draw(st.sampled_from(DTYPES)))
    bound = st.none() | st.integers(-9, 2000)
    index = tuple(slice(data.draw(bound), data.draw(bound)) for _ in range(data.draw(st.integers(0, 2))))
    with open_checkpoint(plain_folder(tmp_path_factory.mktemp("ck"), {"before": torch.ones(3), "w": tensor})) as checkpoint:
        read = checkpoint.read("w", index)
        view = checkpoint.view("w", index, dtype=tensor.dtype)
    if 0 in read.shape or (len(read) - 1) * tensor.shape[1] + read.shape[1] > 1.1 * read.numel():
        assert view is None, "it is empty, or most of its pages would be of other columns"
        return
    assert view is not None
    assert view.stride(1) == 1
    assert view.dtype == read.dtype
    assert torch.equal(view, read)
    kept(view)
    assert torch.equal(view, read)


def test_what_is_of_another_kind_has_no_view(tmp_path: Path) -> None:
    tensors = {"flat": torch.ones(6), "w": torch.ones(2, 3), "deep": torch.ones(2, 3, 4)}
    with open_checkpoint(plain_folder(tmp_path, tensors)) as checkpoint:
        assert checkpoint.view("flat", dtype=torch.float32) is None
        assert checkpoint.view("deep", dtype=torch.float32) is None
        assert checkpoint.view("w", dtype=torch.bfloat16) is None, "it would have to be cast"
        with pytest.raises(CheckpointError, match="has no tensor 'missing'"):
            checkpoint.view("missing", dtype=torch.float32)
        with pytest.raises(ValueError, match="slice of step 1"):
            checkpoint.view("w", (slice(0, 2, 2),), dtype=torch.float32)
    with pytest.raises(ValueError, match="is closed"):
        checkpoint.view("w", dtype=torch.float32)


def test_a_column_of_a_tensor_stored_the_other_way_round_has_no_view(tmp_path: Path) -> None:
    (tmp_path / "ck").mkdir()
    folder = plain_folder(tmp_path / "ck", {"w": torch.ones(2, 3)})
    for file in folder.glob("*.safetensors"):
        file.unlink()
    torch.save({"w": torch.arange(6.0).view(3, 2).t()}, folder / "pytorch_model.bin")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.view("w", dtype=torch.float32) is None
        column = checkpoint.view("w", (slice(None), slice(1, 2)), dtype=torch.float32)
        assert column is not None, "rows of one number are as they are wanted"
        assert column.tolist() == [[2.0], [3.0]]
        assert checkpoint.view("w", (slice(1, 2),), dtype=torch.float32) is None


def test_a_view_outlives_the_checkpoint_and_its_file_and_no_longer(tmp_path: Path) -> None:
    tensor = torch.randn(300, 70)
    folder = plain_folder(tmp_path, {"w": tensor})
    with open_checkpoint(folder) as checkpoint:
        view, rows = viewed(checkpoint, "w"), viewed(checkpoint, "w", (slice(100, 200), slice(3, 69)))
        assert checkpoint.bytes_read == view.nbytes + rows.numel() * 4
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert torch.equal(view, tensor)
    assert torch.equal(rows, tensor[100:200, 3:69])
    assert is_mapped(folder)
    del view
    assert is_mapped(folder), "the other is there"
    del rows
    assert not is_mapped(folder)


def test_what_is_kept_needs_no_file(tmp_path: Path) -> None:
    """Cut to nothing, which would end whoever looked at a mapped page of it."""
    tensor = torch.randn(1100, 1000)
    folder = plain_folder(tmp_path, {"before": torch.ones(5), "w": tensor})
    with open_checkpoint(folder) as checkpoint:
        view = viewed(checkpoint, "w")
    place = view.data_ptr()
    assert kept(view) == 3, "parts of 2 MiB"
    assert not is_mapped(folder)
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"")
    assert view.data_ptr() == place
    assert torch.equal(view, tensor)


def test_others_read_while_parts_are_moved(tmp_path: Path) -> None:
    tensor = torch.randint(-9, 9, (4096, 1024)).float()
    with open_checkpoint(plain_folder(tmp_path, {"w": tensor})) as checkpoint:
        view = viewed(checkpoint, "w")
    stop, begun, sums = threading.Event(), threading.Event(), set[float]()

    def read() -> None:
        while not stop.is_set():
            sums.add(view.sum(dtype=torch.float64).item())
            begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    begun.wait()
    assert kept(view) == 9
    stop.set()
    reader.join()
    assert sums == {tensor.sum(dtype=torch.float64).item()}


@pytest.mark.parametrize("missing", [1, 100, 5000, 100_000])
def test_a_file_that_was_cut_is_told_before_anybody_looks(tmp_path: Path, missing: int) -> None:
    """Also where the end that is missing would be zeros of a page that is there."""
    folder = plain_folder(tmp_path, {"w": torch.ones(3000, 10)})
    with open_checkpoint(folder) as checkpoint:
        [file] = folder.glob("*.safetensors")
        whole = file.stat().st_size
        with file.open("rb+") as opened:
            opened.truncate(whole - missing)
        said = rf"{file.name}: ends before byte {whole}, inside a tensor; it was cut after"
        with pytest.raises(CheckpointError, match=said):
            viewed(checkpoint, "w")
        assert not is_mapped(folder)


def test_what_is_not_in_the_page_cache_is_asked_for_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, 1000)
    folder = plain_folder(tmp_path, {"w": tensor})
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(mapped.os, "posix_fadvise", lambda fd, begin, size, advice: asked.append((begin, size)))
    with open_checkpoint(folder) as checkpoint:
        assert torch.equal(viewed(checkpoint, "w"), tensor)
        assert asked == [], "it was written a moment ago"
        monkeypatch.setattr(mapped, "_is_cached", lambda address: False)
        assert torch.equal(viewed(checkpoint, "w"), tensor)
    [(begin, size)] = asked
    assert begin == 0
    assert tensor.nbytes < size < tensor.nbytes + 8192


class Libc:
    """The system's calls but for those that are given."""

    def __init__(self, **others: Callable[..., Any]) -> None:
        self.__dict__ |= others

    def __getattr__(self, name: str) -> Any:
        return getattr(REAL, name)


REAL = mapped._libc


def test_pages_that_cannot_be_fetched_are_left_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a kernel that does not know how, or from a disk that fails: which it is, a read says."""
    folder = plain_folder(tmp_path, {"w": torch.ones(3, 10)})
    monkeypatch.setattr(mapped, "_libc", Libc(madvise=lambda *_: -1))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.view("w", dtype=torch.float32) is None
        assert checkpoint.bytes_read == 0
    assert not is_mapped(folder)


def test_advice_that_is_refused_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    tensor = torch.randn(30, 10)
    folder = plain_folder(tmp_path, {"w": tensor})
    monkeypatch.setattr(mapped, "_is_cached", lambda address: False)
    monkeypatch.setattr(mapped.os, "posix_fadvise", refuse)
    with open_checkpoint(folder) as checkpoint:
        assert torch.equal(viewed(checkpoint, "w"), tensor)
    assert not is_mapped(folder)


def test_where_there_is_no_memory_it_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1100, 1000)
    folder = plain_folder(tmp_path, {"w": tensor})
    with open_checkpoint(folder) as checkpoint:
        view = viewed(checkpoint, "w")
    calls = SimpleNamespace(left=1)

    def once(*arguments: Any) -> int | None:
        calls.left -= 1
        return mapped._FAILED if calls.left < 0 else REAL.mmap(*arguments)

    monkeypatch.setattr(mapped, "_libc", Libc(mmap=once))
    with pytest.raises(MemoryError, match="no memory for 2097152 bytes of a weight"):
        kept(view)
    assert is_mapped(folder)
    assert torch.equal(view, tensor)
    monkeypatch.setattr(mapped, "_libc", Libc(mremap=lambda *_: mapped._FAILED))
    with pytest.raises(MemoryError, match="could not be moved"):
        kept(view)
    assert torch.equal(view, tensor)
