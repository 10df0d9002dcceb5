"""The heap of the C library, in numbers."""

from __future__ import annotations

from finetune.forecast.heap import Heap
from host.heap import TENSOR_BYTES


def test_large_tensors_give_their_memory_back_and_small_ones_leave_gaps() -> None:
    heap = Heap()
    kib = 1 << 10
    heap.take(1, 40 * TENSOR_BYTES)
    heap.take(2, 512 * kib)
    heap.take(3, 512 * kib)
    heap.give(1)
    assert heap.mapped_bytes == 0
    heap.give(2)
    assert heap.resident_bytes > 1024 * kib, "what is freed below another piece stays"
    assert heap.gap_bytes >= 512 * kib
    heap.take(4, 256 * kib)
    assert heap.resident_bytes < 1050 * kib, "and is used again"


def test_a_tensor_is_mapped_by_itself_from_the_size_on_that_ranks_set() -> None:
    heap = Heap()
    for number, size in enumerate((TENSOR_BYTES - 4096, TENSOR_BYTES, 20 * TENSOR_BYTES) * 2):
        heap.take(number, size)
        assert (heap.mapped_bytes > 0) == (size >= TENSOR_BYTES)
        heap.give(number)


def test_a_gap_is_too_small_for_a_tensor_of_its_own_size() -> None:
    heap = Heap()
    for number in range(3):
        heap.take(number, 1 << 19, followed=True)
    heap.give(1)
    before = heap.resident_bytes
    heap.take(3, 1 << 19)
    assert heap.resident_bytes > before + (1 << 18), "alignment asks for more than the gap has"
