"""Memory for weights on the CPU, in pages of 2 MiB where the kernel gives them.

A page of 4 KiB costs a fault when it is first written, and a place among the processor's address translations at every step
that streams through it. An allocator gives each tensor memory of its own, in which the first and last pages stay small: all of
them, for a weight of 2 MiB. Here weights lie one behind the other in areas that begin at a multiple of 2 MiB.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Final

import torch
from torch import Tensor

HUGE_PAGE_BYTES: Final = 2 << 20
AREA_BYTES: Final = 32 << 20
"""What one area takes of addresses, and of memory only as far as it is written to."""
ALIGNMENT_BYTES: Final = 64


class WeightMemory:
    """Gives tensors that stay as long as a model's weights do.

    An area is given back to the system when the last tensor in it is gone. Where the kernel has no huge pages, the memory is of
    small ones.
    """

    def __init__(self) -> None:
        self._area = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous CPU tensor whose values are not set; its address is a multiple of ``ALIGNMENT_BYTES``."""
        count = math.prod(shape) * dtype.itemsize
        if count > AREA_BYTES // 2:
            return _new_area(count)[:count].view(dtype).view(shape)
        if self._used + count > self._area.numel():
            self._area, self._used = _new_area(AREA_BYTES), 0
        part = self._area[self._used : self._used + count]
        self._used += -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return part.view(dtype).view(shape)


def _new_area(num_bytes: int) -> Tensor:
    """Untouched private memory of whole huge pages, at least ``num_bytes``."""
    size = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[first : first + size]
