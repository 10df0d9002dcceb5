"""How much memory tensors on a CPU hold: glibc's malloc, and the pages of the large ones, in numbers alone.

A small tensor lies in the C library's heap, which grows at its end alone: what is freed inside it is used again, by best fit,
and stays resident until then. A large one has pages (``finetune.machine.pages``) that are kept for whatever large one is next.

torch's tensors are aligned, for which malloc takes more than is needed and frees what is too much in front and behind. So a gap
as large as a tensor is too small for another one of its size, unless it grows together with the gaps beside it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from finetune.machine.pages import SMALLEST_BYTES
from host.heap import TENSOR_BYTES

_PADDING: Final = 128 << 10
"""Bytes the heap grows by beyond what is asked for, and keeps at its end when it shrinks."""
_PAGE: Final = 4096
_HEADER: Final = 16
_SMALLEST: Final = 32
"""Bytes of a gap, at least."""
_ALIGNED: Final = 64
"""torch's tensors begin at multiples of it."""


class Heap:
    """Where pieces of memory lie, and what that keeps resident. Pieces are numbered by the caller."""

    def __init__(self, *, keeps_end: bool = False) -> None:
        """An empty heap.

        Args:
            keeps_end: whether something small always lies at its end, so that it never shrinks.
        """
        self._keeps_end = keeps_end
        self.paged_bytes = 0
        """In pieces of whole pages."""
        self._held_bytes = 0
        """In these and in free pages."""
        self.used_bytes = 0
        """In pieces of the heap."""
        self._pieces: dict[int, tuple[int, int]] = {}
        """Number -> begin and size; begin is -1 for what has pages."""
        self._free: list[tuple[int, int]] = []
        """Size and begin of every gap, in that order."""
        self._gap_at: dict[int, int] = {}
        """Begin of a gap -> its end."""
        self._gap_to: dict[int, int] = {}
        """End of a gap -> its begin."""
        self._top = self._end = self._touched = 0

    @property
    def resident_bytes(self) -> int:
        """What of the heap holds or has held something, and all pages that are held."""
        return self._touched + self._held_bytes

    @property
    def gap_bytes(self) -> int:
        """Resident bytes of the heap that hold nothing: gaps between pieces, and what lies behind the last one."""
        return self._touched - self.used_bytes

    @property
    def free_page_bytes(self) -> int:
        """Pages that are held and hold nothing: whatever large tensor is next has them."""
        return self._held_bytes - self.paged_bytes

    def give_back(self) -> None:
        """Free pages go back to the system (``finetune.machine.pages.give_back``)."""
        self._held_bytes = self.paged_bytes

    def take(self, number: int, size: int, *, followed: bool = False) -> None:
        """A piece of ``size`` bytes is made.

        Args:
            followed: whether something small that stays comes to lie in what alignment leaves in front of it.
        """
        if size >= SMALLEST_BYTES:
            whole = -(-size // _PAGE) * _PAGE
            self._pieces[number] = (-1, whole)
            self.paged_bytes += whole
            self._held_bytes = max(self._held_bytes, self.paged_bytes)
            return
        whole = -(-(size + _HEADER) // _HEADER) * _HEADER
        asked = whole + _ALIGNED + _SMALLEST
        found = self._place(asked)
        begin = -(-(found + _HEADER) // _ALIGNED) * _ALIGNED - _HEADER
        if 0 < begin - found < _SMALLEST:
            begin += _ALIGNED
        self._pieces[number] = (begin, whole)
        self.used_bytes += whole
        if begin > found and not followed:
            self._leave(found, begin)
        if begin + whole < found + asked:
            self._leave(begin + whole, found + asked)

    def take_unwritten(self, number: int, size: int) -> None:
        """A large piece is made and nothing written: free pages lie below its begin, the rest is not resident until it is."""
        held = min(-(-size // _PAGE) * _PAGE, self.free_page_bytes)
        self._pieces[number] = (-1, held)
        self.paged_bytes += held

    def write(self, number: int, size: int) -> None:
        """The first ``size`` bytes of what ``take_unwritten`` made are written."""
        begin, held = self._pieces[number]
        more = max(0, -(-size // _PAGE) * _PAGE - held)
        self._pieces[number] = (begin, held + more)
        self.paged_bytes += more
        self._held_bytes += more

    def size_of(self, number: int) -> int:
        """Resident bytes of the piece of this number."""
        return self._pieces[number][1]

    def give(self, number: int) -> None:
        """Free the piece of this number."""
        begin, size = self._pieces.pop(number)
        if begin < 0:
            self.paged_bytes -= size
            return
        self.used_bytes -= size
        self._leave(begin, begin + size)

    def _leave(self, begin: int, end: int) -> None:
        """These bytes are free: joined with the gaps beside them, or with what is behind the last piece."""
        if begin in self._gap_to:
            begin = self._drop_gap(self._gap_to[begin])
        if end in self._gap_at:
            following = self._gap_at[end]
            self._drop_gap(end)
            end = following
        if end != self._top:
            self._add_gap(begin, end)
            return
        self._top = begin
        if not self._keeps_end and self._end - self._top > TENSOR_BYTES:
            self._end = self._top + _PADDING
            self._touched = min(self._touched, self._end)

    def _place(self, size: int) -> int:
        """Where ``size`` bytes of the heap begin."""
        index = bisect_left(self._free, (size, 0))
        if index < len(self._free):
            _, begin = self._free[index]
            end = self._gap_at[begin]
            self._drop_gap(begin)
            if begin + size < end:
                self._add_gap(begin + size, end)
            return begin
        begin = self._top
        self._top += size
        if self._top > self._end:
            self._end = self._top + _PADDING
        self._touched = max(self._touched, self._top)
        return begin

    def _add_gap(self, begin: int, end: int) -> None:
        insort(self._free, (end - begin, begin))
        self._gap_at[begin], self._gap_to[end] = end, begin

    def _drop_gap(self, begin: int) -> int:
        end = self._gap_at.pop(begin)
        del self._gap_to[end]
        del self._free[bisect_left(self._free, (end - begin, begin))]
        return begin
