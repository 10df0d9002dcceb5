"""Work of the event loop that others go before."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

MOST_WAITING: Final = 512
"""Then one that waits goes on for each that comes: what waits takes memory."""
_PAUSE_SECONDS: Final = 0.002
"""From one to the next: what it takes to refuse a call is some tenths of a millisecond, or one on a slow machine."""

_Line = dict[asyncio.Future[None], None]
"""Those of one peer, in their order."""


class Pace:
    """Lets what nobody should wait for go on one after the other, with pauses in which the loop answers everyone else.

    One that comes alone does not wait; of more than one every two milliseconds up to ``MOST_WAITING`` do. Peers take turns.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        """By peer, whose turn is next first; none is empty."""
        self._num_waiting = 0
        self._free_at = 0.0
        """On the loop's clock: when the next may go on."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        """How many wait for their turn."""
        return self._num_waiting

    async def turn(self, peer: str) -> None:
        """Wait until it is this one's turn. Cancelled, it takes no turn."""
        loop = asyncio.get_running_loop()
        if not self._num_waiting and loop.time() >= self._free_at:
            self._free_at = loop.time() + _PAUSE_SECONDS
            return
        future = loop.create_future()
        self._lines.setdefault(peer, {})[future] = None
        self._num_waiting += 1
        if self._timer is None:
            self._timer = loop.call_at(self._free_at, self._next, loop)
        if self._num_waiting > MOST_WAITING:
            self._let_one_go()
        try:
            await future
        finally:
            if future in self._lines.get(peer, {}):  # it was cancelled
                self._leave(peer, future)

    def _leave(self, peer: str, future: asyncio.Future[None]) -> None:
        line = self._lines.pop(peer)
        del line[future]
        self._num_waiting -= 1
        if line:
            self._lines[peer] = line  # behind the others

    def _let_one_go(self) -> bool:
        """Those that were cancelled a moment ago are passed over; False if there is no other."""
        while self._lines:
            peer, line = next(iter(self._lines.items()))
            future = next(iter(line))
            self._leave(peer, future)
            if not future.done():
                future.set_result(None)
                return True
        return False

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._let_one_go():
            self._free_at = loop.time() + _PAUSE_SECONDS
            self._timer = loop.call_at(self._free_at, self._next, loop)
