"""The heap of the C library, in numbers."""

from __future__ import annotations

from finetune.forecast.heap import Heap


def test_large_tensors_give_their_memory_back_and_small_ones_leave_gaps() -> None:
    heap = Heap()
    mib = 1 << 20
    heap.take(1, 40 * mib)
    heap.take(2, mib)
    heap.take(3, mib)
    heap.give(1)
    assert heap.mapped_bytes == 0
    heap.give(2)
    assert heap.resident_bytes > 2 * mib, "what is freed below another piece stays"
    assert heap.gap_bytes >= mib
    heap.take(4, mib // 2)
    assert heap.resident_bytes < 2.1 * mib, "and is used again"


def test_the_heap_takes_larger_tensors_once_such_were_freed() -> None:
    heap = Heap()
    for number in range(2):
        heap.take(number, 20 << 20)
        assert heap.mapped_bytes == (0 if number else heap.resident_bytes)
        heap.give(number)


def test_a_gap_is_too_small_for_a_tensor_of_its_own_size() -> None:
    heap = Heap()
    for number in range(3):
        heap.take(number, 1 << 20, followed=True)
    heap.give(1)
    before = heap.resident_bytes
    heap.take(3, 1 << 20)
    assert heap.resident_bytes > before + (1 << 19), "alignment asks for more than the gap has"
