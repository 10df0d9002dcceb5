"""What is in flight: the streams and calls that have not ended, and how they are waited for or cut short."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from serve.errors import Unavailable
from serve.runtime.stream import Stream

FAREWELL_SECONDS = 1.0
"""After a cut: for readers to meet the error their streams end with."""

_log = logging.getLogger(__name__)


class CallInFlight:
    """A call of several streams: in flight also between two of them."""

    def __init__(self) -> None:
        self.error: Unavailable | None = None
        """Why it may start no further stream."""


class Flight:
    """Streams from their start until they were read to their end or closed, and calls of several streams.

    Belongs to the event loop.
    """

    def __init__(self) -> None:
        self._streams: set[Stream] = set()
        self._calls: set[CallInFlight] = set()
        self._is_over = asyncio.Event()
        self._is_over.set()

    def __len__(self) -> int:
        """How many streams are in flight."""
        return len(self._streams)

    def add(self, stream: Stream) -> None:
        self._streams.add(stream)
        self._is_over.clear()

    def remove(self, stream: Stream) -> None:
        """A stream has ended; once more does no harm."""
        self._streams.discard(stream)
        self._look()

    @contextlib.contextmanager
    def call(self) -> Iterator[CallInFlight]:
        """A call of several streams, in flight until the block ends."""
        call = CallInFlight()
        self._calls.add(call)
        self._is_over.clear()
        try:
            yield call
        finally:
            self._calls.discard(call)
            self._look()

    def fail_all(self, error: Unavailable) -> None:
        """End every stream behind what it has still to give; it counts as the server's failure."""
        self._end_calls(error)
        for stream in tuple(self._streams):
            stream.fail(error)

    def cut_all(self, error: Unavailable) -> None:
        """End every stream, in the engine too."""
        self._end_calls(error)
        for stream in tuple(self._streams):
            stream.cut(error)

    async def until_over(self, *, at_most_seconds: float, error: Unavailable) -> None:
        """Wait until nothing is in flight; what takes longer is cut with ``error``."""
        if await self._wait(at_most_seconds):
            return
        _log.warning("%d requests did not end within %g s", len(self), at_most_seconds)
        self.cut_all(error)
        if not await self._wait(FAREWELL_SECONDS):
            _log.warning("%d readers have gone silent", len(self))

    async def _wait(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._is_over.wait()
        except TimeoutError:
            return False
        return True

    def _end_calls(self, error: Unavailable) -> None:
        for call in self._calls:
            call.error = call.error or error

    def _look(self) -> None:
        if not self._streams and not self._calls:
            self._is_over.set()
