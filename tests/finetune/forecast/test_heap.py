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


def test_a_large_tensor_lies_in_a_gap_that_is_large_enough() -> None:
    heap = Heap()
    for number in range(8):
        heap.take(number, TENSOR_BYTES // 2)
    for number in range(6):
        heap.give(number)
    before = heap.resident_bytes
    heap.take(8, 2 * TENSOR_BYTES)
    assert (heap.mapped_bytes, heap.resident_bytes) == (0, before), "malloc looks among gaps before it asks the system"
    heap.take(9, 2 * TENSOR_BYTES)
    assert heap.mapped_bytes >= 2 * TENSOR_BYTES


def test_a_heap_shrinks_unless_something_lies_at_its_end() -> None:
    for keeps_end in (False, True):
        heap = Heap(keeps_end=keeps_end)
        for number in range(8):
            heap.take(number, TENSOR_BYTES // 2)
        for number in range(8):
            heap.give(number)
        assert (heap.resident_bytes > 3 * TENSOR_BYTES) == keeps_end
