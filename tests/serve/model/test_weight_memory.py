"""Tensors that share areas of memory: none overlaps another, and an area goes back to the system with its last tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serve.model.weight_memory import AREA_BYTES, HUGE_PAGE_BYTES, WeightMemory

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
