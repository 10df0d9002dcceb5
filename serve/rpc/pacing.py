"""Work of the event loop that others go before."""

from __future__ import annotations

import asyncio
from typing import Final

MOST_WAITING: Final = 512
"""Then the one that has waited longest goes on for each that comes: what waits takes memory."""
_PAUSE_SECONDS: Final = 0.002
"""From one to the next: what it takes to refuse a call is some tenths of a millisecond, or one on a slow machine."""


class Pace:
    """Lets what nobody should wait for go on one after the other, with pauses in which the loop answers everyone else.

    One that comes alone does not wait; of more than one every two milliseconds up to ``MOST_WAITING`` do.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}
        """In the order in which they came."""
        self._free_at = 0.0
        """On the loop's clock: when the next may go on."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        """How many wait for their turn."""
        return len(self._waiting)

    async def turn(self) -> None:
        """Wait until it is this one's turn. Cancelled, it takes no turn."""
        loop = asyncio.get_running_loop()
        if not self._waiting and loop.time() >= self._free_at:
            self._free_at = loop.time() + _PAUSE_SECONDS
            return
        future = loop.create_future()
        self._waiting[future] = None
        if self._timer is None:
            self._timer = loop.call_at(self._free_at, self._next, loop)
        if len(self._waiting) > MOST_WAITING:
            self._let_one_go()
        try:
            await future
        finally:
            self._waiting.pop(future, None)

    def _let_one_go(self) -> bool:
        """Those that were cancelled a moment ago are passed over; False if there is no other."""
        while self._waiting:
            future = next(iter(self._waiting))
            del self._waiting[future]
            if not future.done():
                future.set_result(None)
                return True
        return False

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._let_one_go():
            self._free_at = loop.time() + _PAUSE_SECONDS
            self._timer = loop.call_at(self._free_at, self._next, loop)
