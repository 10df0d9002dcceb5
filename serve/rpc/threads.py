"""The few threads on which the RPC layer does what would keep the event loop from its other calls."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from serve.errors import QueueFull
from serve.rpc.identity import CALLER
from serve.rpc.room import Room

T = TypeVar("T")

INLINE_BYTES: Final = 16_384
"""A message up to this long is read, checked and converted on the event loop: whatever it holds, that takes less than the loop
can spare."""

_RETRY_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    work: Callable[[], Any]
    done: Future[Any]


class TurnThreads:
    """A few threads at which callers take turns: however much of one waits, a piece of another waits for one of each at most.

    May be called from any thread. Always true: while a piece waits, all threads are busy.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        """
        Args:
            name: what the threads' names begin with.
        """
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.Lock()
        self._lines: OrderedDict[str, deque[_Piece]] = OrderedDict()
        """What waits of each caller, by whose turn is next; nobody's line is empty."""
        self._num_busy = 0

    def num_waiting(self, whose: str) -> int:
        """How much of a caller waits for its turn."""
        with self._lock:
            return len(self._lines.get(whose, ()))

    def submit(self, whose: str, work: Callable[[], T], most_waiting: int | None = None) -> Future[T]:
        """Have a thread do a piece of work when it is its caller's turn. Cancelling what waits takes it out of its line.

        Args:
            most_waiting: pieces of the caller that may wait; ``None`` where something else bounds them.

        Raises:
            QueueFull: so much of the caller waits already.
        """
        piece = _Piece(work, Future())
        with self._lock:
            is_busy = self._num_busy == self._num_threads
            if most_waiting is not None and is_busy and len(self._lines.get(whose, ())) >= most_waiting:
                message = f"{most_waiting} texts of this caller wait to be made tokens, which is the limit; try again in 1 s"
                raise QueueFull(message, reason="requests", retry_after_seconds=_RETRY_SECONDS)
            self._lines.setdefault(whose, deque()).append(piece)
            if not is_busy:
                self._num_busy += 1
                self._pool.submit(self._work)
        piece.done.add_done_callback(lambda done: self._take_out(whose, piece) if done.cancelled() else None)
        return piece.done

    def _work(self) -> None:
        while (piece := self._next()) is not None:
            if piece.done.set_running_or_notify_cancel():
                try:
                    result = piece.work()
                except BaseException as error:
                    piece.done.set_exception(error)
                else:
                    piece.done.set_result(result)
                    del result  # or the thread would keep it until its next piece

    def _next(self) -> _Piece | None:
        with self._lock:
            if not self._lines:
                self._num_busy -= 1
                return None
            whose, line = self._lines.popitem(last=False)
            piece = line.popleft()
            if line:
                self._lines[whose] = line
            return piece

    def _take_out(self, whose: str, piece: _Piece) -> None:
        with self._lock:
            line = self._lines.get(whose)
            if line is not None and piece in line:
                line.remove(piece)
                if not line:
                    del self._lines[whose]


_text_threads: Final = TurnThreads(2, "text")
"""Few, so that a flood of long texts does not take the cores from the ranks."""
_message_threads: Final = TurnThreads(2, "message")
"""For work that the size of a message bounds: it never waits behind texts, or behind templates, which may run for long."""
_room: Final = Room()
"""For what waits for either."""


async def in_text_thread(work: Callable[[], T], num_bytes: int, *, most_waiting: int, most_bytes: int) -> T:
    """Run ``work`` in one of the few threads for long texts and chat templates, at which tenants take turns.

    Args:
        num_bytes: what the work holds.
        most_waiting: texts and conversations of the tenant that calls that may wait.
        most_bytes: of all tenants that may wait; see ``Room``.

    Raises:
        QueueFull: so many wait, or there is no room for so many bytes.
    """
    whose = CALLER.get().name
    with _room.taken(whose, num_bytes, most_bytes):
        return await asyncio.wrap_future(_text_threads.submit(whose, work, most_waiting))


async def in_message_thread(work: Callable[[], T], num_bytes: int = 0, *, most_bytes: int | None = None) -> T:
    """Run ``work`` in one of the few threads for what takes a bounded time, by the size of a message; tenants take turns.

    Args:
        num_bytes: what the work holds of what a client sent.
        most_bytes: of all tenants that may wait; see ``Room``.

    Raises:
        QueueFull: there is no room for so many bytes.
    """
    whose = CALLER.get().name
    with _room.taken(whose, num_bytes, most_bytes):
        return await asyncio.wrap_future(_message_threads.submit(whose, work))


async def off_loop(message: Message, work: Callable[[], T]) -> T:
    """Do ``work`` on ``message``, which was read: in a thread if it is large, else at once."""
    num_bytes = message.ByteSize()
    return await in_message_thread(work, num_bytes) if num_bytes > INLINE_BYTES else work()
