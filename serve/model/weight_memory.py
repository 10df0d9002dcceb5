"""Memory for weights on the CPU, in pages of 2 MiB where the kernel gives them.

A page of 4 KiB costs a place among the processor's address translations at every step that streams through it. An allocator
gives each tensor memory of its own, in which the first and last pages stay small: all of them, for a weight of 2 MiB. Here
weights lie one behind the other in areas that begin at a multiple of 2 MiB.

A page of 2 MiB is dear to get in one piece while the model loads: on virtual machines whose host takes back what is free, up to
six times what small ones cost. So areas begin with small pages, and ``gather_pages`` makes large ones of them when the model
serves (Linux 6.1; on older kernels they are large from the beginning). How fast it goes on while steps never end follows from
what a page takes: until they are large a step of one sequence takes up to 1.5 times as long.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from serve.model.pace import Pace

HUGE_PAGE_BYTES: Final = 2 << 20
AREA_BYTES: Final = 32 << 20
"""What one area takes of addresses, and of memory only as far as it is written to."""
ALIGNMENT_BYTES: Final = 64

_COLLAPSE: Final = 25
"""MADV_COLLAPSE of <linux/mman.h>: make one large page of what lies there, now."""
_SETTING: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class WeightMemory:
    """Gives tensors that stay as long as a model's weights do, to any thread.

    An area is given back to the system when the last tensor in it is gone. Where the kernel has no huge pages, the memory is of
    small ones.
    """

    def __init__(self, *, large: bool = False) -> None:
        """
        Args:
            large: pages are large from the beginning: it is written to when the model serves.
        """
        self._large = large
        self._lock = threading.Lock()
        self._area = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous CPU tensor whose values are not set; its address is a multiple of ``ALIGNMENT_BYTES``."""
        count = math.prod(shape) * dtype.itemsize
        if count > AREA_BYTES // 2:
            return _new_area(count, self._large)[:count].view(dtype).view(shape)
        with self._lock:
            if self._used + count > self._area.numel():
                self._area, self._used = _new_area(AREA_BYTES, self._large), 0
            part = self._area[self._used : self._used + count]
            self._used += -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return part.view(dtype).view(shape)


class _Mapping(mmap.mmap):
    """Private memory of the process, and where its huge pages begin; can be referred to weakly."""

    first: int = 0
    """Address of the first whole huge page."""
    num_pages: int = 0
    """Whole huge pages from there."""


_small: list[weakref.ref[_Mapping]] = []
"""Areas that nobody has made large pages of yet."""


def _new_area(num_bytes: int, large: bool) -> Tensor:
    """Untouched private memory of whole huge pages, at least ``num_bytes``."""
    size = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = _Mapping(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE_BYTES
    memory.first, memory.num_pages = whole.data_ptr() + begin, size // HUGE_PAGE_BYTES
    if large or not _advise(memory.first, 0, _COLLAPSE):
        _advise(memory.first, size, mmap.MADV_HUGEPAGE)
    elif _wanted():
        _small.append(weakref.ref(memory))
    return whole[begin : begin + size]


def gather_pages(wait: Callable[[float], None] = lambda _: None) -> None:
    """Make large pages of the small ones that weights have been written to, page after page.

    A page can be read all the time but for the moment in which it is copied. What cannot be had, for want of memory, stays as
    it is.

    Args:
        wait: called before each page: returns when the processor is free for it, or after so many seconds.
    """
    global _small
    areas, _small = _small, []
    pace = Pace(wait)
    for area in areas:
        number, more = 0, True
        while more:
            with pace.part():
                more = _gather_page(area, number)
            number += 1


def _gather_page(area: weakref.ref[_Mapping], number: int) -> bool:
    """Make a large page of an area's part with this number; whether there is another one.

    The area is held no longer than that: its last tensor may go meanwhile, and its memory is free for others then.
    """
    memory = area()
    if memory is None or number >= memory.num_pages:
        return False
    _advise(memory.first + number * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, _COLLAPSE)
    return number + 1 < memory.num_pages


def _wanted() -> bool:
    """Whether the machine's operator lets processes have huge pages."""
    try:
        return "[never]" not in _SETTING.read_text()
    except OSError:
        return False


def _advise(address: int, num_bytes: int, advice: int) -> bool:
    """``madvise``; whether the kernel took it. Other threads run meanwhile, which they would not with ``mmap.madvise``."""
    return bool(_madvise(address, num_bytes, advice) == 0)


_madvise: Final = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
