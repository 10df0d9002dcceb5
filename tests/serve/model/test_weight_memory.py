"""Tensors that share areas of memory: none overlaps another, and an area goes back to the system with its last tensor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from serve.model import pace, weight_memory
from serve.model.weight_memory import AREA_BYTES, HUGE_PAGE_BYTES, WeightMemory, gather_pages

SIZES = [1, 63, 64, 65, 4096, HUGE_PAGE_BYTES, AREA_BYTES // 2, AREA_BYTES // 2 + 1, AREA_BYTES + 1, 3, 0]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_no_tensor_overlaps_another() -> None:
    memory = WeightMemory()
    tensors = [memory.empty((size,), torch.uint8).fill_(number) for number, size in enumerate(SIZES * 3)]
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full_like(tensor, number))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_tensor_has_the_shape_and_type_asked_for_at_an_address_that_vectors_like(dtype: torch.dtype) -> None:
    memory = WeightMemory()
    for shape in [(3, 5), (7,), (), (2, 0, 4), (1, 1025, 3)]:
        tensor = memory.empty(shape, dtype)
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        assert tensor.data_ptr() % 64 == 0


def test_a_large_tensor_begins_with_a_huge_page() -> None:
    assert WeightMemory().empty((AREA_BYTES,), torch.uint8).data_ptr() % HUGE_PAGE_BYTES == 0


def test_what_was_never_written_takes_no_memory_and_what_is_dropped_gives_it_back() -> None:
    memory = WeightMemory()
    before = resident_bytes()
    tensors = [memory.empty((AREA_BYTES // 4,), torch.uint8) for _ in range(16)]
    assert resident_bytes() - before < AREA_BYTES // 4
    for tensor in tensors:
        tensor.fill_(1)
    assert resident_bytes() - before >= 4 * AREA_BYTES
    del tensor
    tensors.clear()
    assert resident_bytes() - before < 2 * AREA_BYTES


def huge_bytes() -> int:
    [line] = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("AnonHugePages:")]
    return int(line.split()[1]) << 10


def test_large_pages_are_made_of_what_was_written_and_of_nothing_else() -> None:
    if not weight_memory._wanted() or not weight_memory._advise(0, 0, weight_memory._COLLAPSE):
        pytest.skip("this kernel makes no huge page of small ones")
    gather_pages()
    memory = WeightMemory()
    tensors = [memory.empty((AREA_BYTES // 8,), torch.uint8).fill_(number) for number in range(4)]
    before, resident = huge_bytes(), resident_bytes()
    waits = list[int]()
    gather_pages(lambda _: waits.append(huge_bytes()))
    assert len(waits) >= AREA_BYTES // HUGE_PAGE_BYTES, "each page waits until the processor is free"
    assert huge_bytes() - before >= AREA_BYTES // 2
    assert resident_bytes() - resident < HUGE_PAGE_BYTES
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full_like(tensor, number))


def test_a_page_waits_twice_as_long_as_the_last_took_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_memory, "_small", [])
    tensor = WeightMemory().empty((AREA_BYTES,), torch.uint8)
    if not weight_memory._small:
        pytest.skip("this kernel makes no huge page of small ones")
    clock, takes, waits = [0.0], iter([0.0001, 0.003, 0.008, 0.04] + [0.0] * 12), list[float]()

    def advise(address: int, num_bytes: int, advice: int) -> bool:
        clock[0] += next(takes)
        return True

    monkeypatch.setattr(weight_memory, "_advise", advise)
    monkeypatch.setattr(pace, "time", SimpleNamespace(thread_time=lambda: clock[0]))
    weight_memory.gather_pages(waits.append)
    assert waits[:6] == pytest.approx([0.002, 0.002, 0.006, 0.016, 0.05, 0.002])
    assert (len(waits), set(waits[6:])) == (AREA_BYTES // HUGE_PAGE_BYTES, {0.002})
    del tensor


def test_an_area_that_is_gone_is_left_alone() -> None:
    WeightMemory().empty((AREA_BYTES,), torch.uint8).fill_(1)
    gather_pages()
    assert not weight_memory._small


def test_an_area_can_go_while_its_next_page_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_memory, "_small", [])
    tensors = [WeightMemory().empty((AREA_BYTES,), torch.uint8)]
    if not weight_memory._small:
        pytest.skip("this kernel makes no huge page of small ones")
    [area], pages = weight_memory._small, list[int]()

    def advise(address: int, num_bytes: int, advice: int) -> bool:
        pages.append(address)
        return True

    def wait(_: float) -> None:
        if len(pages) == 3:
            tensors.clear()
            assert area() is None, "memory that is free is held by whoever waits to make its pages large"

    monkeypatch.setattr(weight_memory, "_advise", advise)
    gather_pages(wait)
    assert len(pages) == 3


def test_where_the_kernel_cannot_pages_are_large_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()

    def old_kernel(address: int, num_bytes: int, advice: int) -> int:
        calls.append(advice)
        return -1

    monkeypatch.setattr(weight_memory, "_madvise", old_kernel)
    assert torch.equal(WeightMemory().empty((3,), torch.uint8).fill_(7), torch.full((3,), 7, dtype=torch.uint8))
    assert calls == [weight_memory._COLLAPSE, weight_memory.mmap.MADV_HUGEPAGE]
