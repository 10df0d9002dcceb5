"""What the C library does with memory that was freed."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
"""Parameters of mallopt(3)."""

TENSOR_BYTES: Final = 1 << 20
"""In training's ranks what is this large or larger is mapped by itself, and an end of the heap that is goes back to the system,
so that gaps between smaller pieces are all that a heap keeps. Tensors of training on a CPU are not in it from a smaller size on
(``finetune.machine.pages``), unless there is no compiler: then a smaller number here would have more pages asked for anew in
every step, for less and less memory."""


_MOST_OF_A_HEAP: Final = 32 << 20
"""What is larger is mapped by itself, whatever is asked for."""


def keep(num_bytes: int) -> None:
    """From now on so much that is freed at the end of a heap stays there, and pieces of up to 32 MiB are made of it.

    Left to itself, glibc gives back an end of twice the largest piece that was freed. Who makes and frees the same pieces over
    and over then has their pages made, and cleared, each time anew. Elsewhere there is no such call.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MOST_OF_A_HEAP)
        mallopt(_M_TRIM_THRESHOLD, num_bytes)


def give_back(num_bytes: int) -> None:
    """From now on a piece of memory this large or larger goes back to the system when it is freed.

    Left to itself, glibc learns from every large piece that is freed to keep those of its size, up to 32 MiB, and keeps
    whatever lies between two pieces in use. Elsewhere there is no such call, and no such habit.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, num_bytes)
        mallopt(_M_TRIM_THRESHOLD, num_bytes)


def share_arenas(count: int) -> None:
    """From now on all threads together take memory from so many heaps; without it each new one may get a heap of its own.

    What many threads in turn had from heaps of their own is kept in each of them. Elsewhere than with glibc nothing changes.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, count)


def trim() -> None:
    """Give the system back every page of the heaps that nothing in use lies on, also between pieces in use.

    It takes some milliseconds, in which a thread that wants memory waits. Elsewhere than with glibc nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
