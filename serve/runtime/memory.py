"""What a server that has started does about its own memory: calls come and go, what it is made of stays."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Final

import psutil

from host import heap

_EVERY_SECONDS: Final = 20.0
_WORTH_BYTES: Final = 8 << 20
"""So much more than there was at the least."""


def set_aside() -> None:
    """Have Python's collector look no more at what there is by now: a look at all of a server's own objects stops every call
    for some tens of milliseconds, and finds next to nothing. What is garbage already is left there, as where ranks are forked
    from: one look for it would be a part of the start."""
    gc.freeze()


def resident_bytes() -> int:
    """What of this process is in memory."""
    return int(psutil.Process().memory_info().rss)


async def keep_trimmed(
    resident: Callable[[], int] = resident_bytes, trim: Callable[[], None] = heap.trim, every_seconds: float = _EVERY_SECONDS
) -> None:
    """Trim the heap again and again while more is in memory than was at the least, until cancelled.

    Pieces in use lie between those that were freed, so glibc itself gives back next to nothing of what many calls had at once.

    Args:
        resident: bytes in memory.
        trim: gives back what is free; called in a thread.
    """
    least = resident()
    while True:
        await asyncio.sleep(every_seconds)
        if (now := resident()) >= least + _WORTH_BYTES:
            await asyncio.to_thread(trim)
            now = resident()
        least = min(least, now)
