"""The heap of the C library and the pages of large tensors, in numbers."""

from __future__ import annotations

import pytest

from finetune.forecast.heap import Heap
from finetune.machine.pages import SMALLEST_BYTES
from host.heap import TENSOR_BYTES

SMALL = SMALLEST_BYTES // 2


def test_small_tensors_leave_gaps_which_others_fill() -> None:
    heap = Heap()
    for number in range(2):
        heap.take(number, SMALL)
    heap.give(0)
    assert heap.resident_bytes > 2 * SMALL, "what is freed below another piece stays"
    assert heap.gap_bytes >= SMALL
    before = heap.resident_bytes
    heap.take(2, SMALL // 2)
    assert heap.resident_bytes == before, "and is used again"


@pytest.mark.parametrize("size", [SMALLEST_BYTES - 4096, SMALLEST_BYTES, 20 * SMALLEST_BYTES])
def test_a_tensor_has_pages_from_a_size_on(size: int) -> None:
    heap = Heap()
    heap.take(0, size)
    assert (heap.paged_bytes, heap.used_bytes > 0) == ((size, False) if size >= SMALLEST_BYTES else (0, True))


def test_pages_that_are_freed_hold_whatever_large_tensor_is_next_and_are_given_back_when_told() -> None:
    heap = Heap()
    heap.take(0, 3 * SMALLEST_BYTES)
    heap.take(1, 2 * SMALLEST_BYTES + 1)
    most = heap.resident_bytes
    assert most == 5 * SMALLEST_BYTES + 4096, "in whole pages"
    heap.give(0)
    heap.give(1)
    assert (heap.resident_bytes, heap.free_page_bytes) == (most, most)
    heap.take(2, 5 * SMALLEST_BYTES)
    assert heap.resident_bytes == most, "pages of both hold it: no gap is too small"
    heap.give_back()
    assert heap.resident_bytes == 5 * SMALLEST_BYTES
    assert heap.free_page_bytes == heap.gap_bytes == 0


def test_what_is_not_written_holds_free_pages_alone() -> None:
    heap = Heap()
    heap.take(0, 3 * SMALLEST_BYTES)
    heap.give(0)
    heap.take_unwritten(1, 5 * SMALLEST_BYTES)
    assert (heap.resident_bytes, heap.size_of(1), heap.free_page_bytes) == (3 * SMALLEST_BYTES, 3 * SMALLEST_BYTES, 0)
    heap.write(1, 2 * SMALLEST_BYTES)
    assert heap.resident_bytes == 3 * SMALLEST_BYTES, "free pages lie where it begins"
    heap.take(2, SMALLEST_BYTES)
    heap.give(2)
    heap.write(1, 5 * SMALLEST_BYTES - 1)
    assert heap.size_of(1) == 5 * SMALLEST_BYTES
    assert heap.resident_bytes == 6 * SMALLEST_BYTES, "what others have freed meanwhile is not its own"
    heap.give(1)
    assert heap.free_page_bytes == 6 * SMALLEST_BYTES
    heap.take_unwritten(3, SMALLEST_BYTES)
    assert heap.size_of(3) == SMALLEST_BYTES, "and no more of it than it is long"


def test_a_gap_is_too_small_for_a_tensor_of_its_own_size() -> None:
    heap = Heap()
    for number in range(3):
        heap.take(number, SMALL, followed=True)
    heap.give(1)
    before = heap.resident_bytes
    heap.take(3, SMALL)
    assert heap.resident_bytes > before + SMALL // 2, "alignment asks for more than the gap has"


def test_a_heap_shrinks_unless_something_lies_at_its_end() -> None:
    count = 4 * TENSOR_BYTES // SMALL
    for keeps_end in (False, True):
        heap = Heap(keeps_end=keeps_end)
        for number in range(count):
            heap.take(number, SMALL)
        for number in range(count):
            heap.give(number)
        assert (heap.resident_bytes > 3 * TENSOR_BYTES) == keeps_end
