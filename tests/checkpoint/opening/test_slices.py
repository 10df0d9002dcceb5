"""This slice of this tensor, in this dtype: compared with torch's own indexing, and with what the kernel counted."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import CheckpointError, open_checkpoint
from checkpoint.opening import slices
from tests.checkpoint.folders import plain_folder, raw_safetensors, write_config

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(1, 7), max_size=4))
    seed = draw(st.integers(0, 1000))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(draw(st.sampled_from(DTYPES)))


@st.composite
def indices(draw: st.DrawFn, ndim: int) -> tuple[slice, ...]:
    bound = st.none() | st.integers(-9, 9)
    return tuple(slice(draw(bound), draw(bound)) for _ in range(draw(st.integers(0, ndim))))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_slice_is_what_torch_would_index(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    tensor = data.draw(tensors())
    index = data.draw(indices(tensor.ndim))
    dtype = data.draw(st.sampled_from([None, *DTYPES]))
    with open_checkpoint(plain_folder(tmp_path_factory.mktemp("ck"), {"before": torch.ones(3), "w": tensor})) as checkpoint:
        got = checkpoint.read("w", index, dtype=dtype)
    want = tensor[index].to(dtype or tensor.dtype)
    assert got.dtype == want.dtype
    assert got.is_contiguous()
    assert got.shape == want.shape
    assert torch.equal(got, want)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_slice_of_a_torch_archive_keeps_the_views_that_were_saved(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    base = data.draw(tensors())
    view = base.permute(data.draw(st.permutations(range(base.ndim))))
    cut = data.draw(indices(view.ndim))
    step = tuple(slice(part.start, part.stop, data.draw(st.integers(1, 2))) for part in cut)
    view = view[step]
    if view.numel() == 0:
        view = base
    index = data.draw(indices(view.ndim))
    dtype = data.draw(st.sampled_from([None, *DTYPES]))
    folder = write_config(tmp_path_factory.mktemp("ck"))
    torch.save({"w": view, "whole": base}, folder / "pytorch_model.bin")
    with open_checkpoint(folder) as checkpoint:
        got = checkpoint.read("w", index, dtype=dtype)
        assert torch.equal(checkpoint.read("whole"), base)
    assert got.is_contiguous()
    assert torch.equal(got, view[index].to(dtype or view.dtype))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_buffer_much_smaller_than_the_slice_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tensor = data.draw(tensors())
    index = data.draw(indices(tensor.ndim))
    folder = write_config(tmp_path_factory.mktemp("ck"))
    torch.save({"w": tensor.permute(tuple(reversed(range(tensor.ndim))))}, folder / "pytorch_model.bin")
    with pytest.MonkeyPatch.context() as patch, open_checkpoint(folder) as checkpoint:
        patch.setattr(slices, "CAST_BYTES", data.draw(st.sampled_from([8, 24, 100])))
        got = checkpoint.read("w", index, dtype=torch.float32)
    assert torch.equal(got, tensor.permute(tuple(reversed(range(tensor.ndim))))[index].float())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_tensor_of_any_strides_is_filled_and_nothing_around_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tensor, dtype = data.draw(tensors()), data.draw(st.sampled_from(DTYPES))
    index = data.draw(indices(tensor.ndim))
    expected = tensor[index].to(dtype)
    order = data.draw(st.permutations(range(tensor.ndim)))
    room = torch.full([expected.shape[dim] + 2 for dim in order], 77.0, dtype=dtype)
    out = room[(slice(1, -1),) * room.ndim].permute([order.index(dim) for dim in range(tensor.ndim)])
    folder = write_config(tmp_path_factory.mktemp("ck"))
    torch.save({"w": tensor}, folder / "pytorch_model.bin")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.read("w", index, out=out) is out
        assert torch.equal(out, expected)
        with pytest.raises(ValueError, match=r"out is \[.*\]; the slice is \["):
            checkpoint.read("w", index, out=torch.empty([size + 1 for size in expected.shape] or [1], dtype=dtype))
    out.fill_(77.0)
    assert torch.equal(room, torch.full_like(room, 77.0))


@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 1), (1, 3)], ids=str)
def test_a_dimension_of_one_element_is_filled_whatever_its_stride(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(3.0, dtype=torch.float64)[: math.prod(shape)].reshape(shape)
    out = torch.empty(64, dtype=torch.float64).as_strided(shape, [7 if size == 1 else 1 for size in shape])
    assert out.is_contiguous()
    with open_checkpoint(plain_folder(tmp_path, {"w": tensor})) as checkpoint:
        checkpoint.read("w", out=out)
    assert torch.equal(out, tensor)


@pytest.mark.parametrize(
    ("index", "fraction"),
    [
        (None, 1.0),
        ((slice(100, 200),), 0.1),
        ((slice(None), slice(0, 250)), 0.25),
        ((slice(500, 600), slice(10, 20)), 0.001),
    ],
    ids=["whole", "rows", "columns", "block"],
)
def test_no_byte_outside_the_slice_is_read(tmp_path: Path, index: tuple[slice, ...] | None, fraction: float) -> None:
    def bytes_through_read_calls() -> int:
        return int(Path("/proc/thread-self/io").read_text().split()[1])

    with open_checkpoint(plain_folder(tmp_path, {"w": torch.ones(1000, 1000)})) as checkpoint:
        start = bytes_through_read_calls()
        looked = bytes_through_read_calls() - start  # what looking itself costs
        start = bytes_through_read_calls()
        checkpoint.read("w", index, dtype=torch.bfloat16)
        read = bytes_through_read_calls() - start - looked
        wanted = int(4_000_000 * fraction)
        assert checkpoint.bytes_read == wanted
        assert abs(read - wanted) < 64  # the counter's own text changes length


MEASURE = """
import sys, torch
from pathlib import Path
from typing import Any
from checkpoint import open_checkpoint

def kib(field):
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(field))

index = eval(sys.argv[2])
with open_checkpoint(sys.argv[1]) as checkpoint:
    checkpoint.read("w", (slice(0, 8), slice(0, 8)), dtype=torch.bfloat16)
    Path("/proc/self/clear_refs").write_text("5")
    before = kib("VmRSS")
    out = checkpoint.read("w", index, dtype=eval(sys.argv[3]))
    print(kib("VmHWM") - before, out.numel() * out.element_size() // 1024)
"""


@pytest.mark.parametrize(
    ("index", "dtype"),
    [("(slice(None), slice(0, 6000))", "torch.bfloat16"), ("(slice(3000, 9000),)", "None"), ("None", "torch.bfloat16")],
    ids=["columns-cast", "rows", "whole-cast"],
)
def test_peak_memory_is_the_result_and_at_most_64_mib_more(tmp_path: Path, index: str, dtype: str) -> None:
    # 576 MB of zeros that take no disk: the file is one large hole.
    header = {"w": {"dtype": "F32", "shape": [12000, 12000], "data_offsets": [0, 576_000_000]}}
    path = write_config(tmp_path) / "model.safetensors"
    raw_safetensors(path, header)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size + 576_000_000)
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), index, dtype], capture_output=True, text=True, check=True
    )
    peak_kib, result_kib = map(int, run.stdout.split())
    assert peak_kib <= result_kib + 64 * 1024


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    tensor = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    wrong: list[int] = []

    def read_rows(number: int) -> None:
        for row in range(64):
            if not torch.equal(checkpoint.read("w", (slice(row, row + 1),), dtype=torch.float16), tensor[row : row + 1].half()):
                wrong.append(number)

    with open_checkpoint(plain_folder(tmp_path, {"w": tensor})) as checkpoint:
        threads = [threading.Thread(target=read_rows, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert checkpoint.bytes_read == 8 * tensor.numel() * 4


@pytest.mark.parametrize(
    ("index", "rule"),
    [
        ((slice(0, 2, 2),), "slice of step 1"),
        ((slice(None),) * 3, "3 slices"),
        ((1,), "slice of step 1"),
        (slice(0, 2), "a tuple of slices"),
        (1, "a tuple of slices"),
    ],
)
def test_an_index_that_is_no_plain_slice_is_refused(tmp_path: Path, index: Any, rule: str) -> None:
    with open_checkpoint(plain_folder(tmp_path, {"w": torch.ones(4, 4)})) as checkpoint, pytest.raises(ValueError, match=rule):
        checkpoint.read("w", index)


def test_integers_are_read_as_they_are_and_not_as_weights(tmp_path: Path) -> None:
    with open_checkpoint(plain_folder(tmp_path, {"w": torch.arange(4)})) as checkpoint:
        assert torch.equal(checkpoint.read("w"), torch.arange(4))
        with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'w' holds torch\.int64"):
            checkpoint.read("w", dtype=torch.float32)
        with pytest.raises(ValueError, match="floating point only"):
            checkpoint.read("w", dtype=torch.int32)
        with pytest.raises(ValueError, match="dtype is float16; tensors are cast to floating point only"):
            checkpoint.read("w", dtype="float16")  # type: ignore[arg-type]


def test_a_file_cut_while_it_is_open_is_named(tmp_path: Path) -> None:
    with open_checkpoint(plain_folder(tmp_path, {"w": torch.ones(100)})) as checkpoint:
        with open(tmp_path / "model.safetensors", "r+b") as file:
            file.truncate(200)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: ends at byte 200"):
            checkpoint.read("w")


def test_reading_after_close_is_an_error_and_closing_twice_is_not(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(plain_folder(tmp_path))
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(ValueError, match="is closed"):
        checkpoint.read("scale")


def test_close_lets_a_read_under_way_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(5))
    checkpoint = open_checkpoint(plain_folder(tmp_path, {"w": tensor}))
    read_stored: Callable[..., tuple[torch.Tensor, int]] = slices.read_stored

    def close_then_read(*args: object, **options: object) -> tuple[torch.Tensor, int]:
        checkpoint.close()
        return read_stored(*args, **options)

    monkeypatch.setattr("checkpoint.opening.open.read_stored", close_then_read)
    assert torch.equal(checkpoint.read("w"), tensor)
    with pytest.raises(ValueError, match="is closed"):
        checkpoint.read("w")
