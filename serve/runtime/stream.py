"""One request's events on the asyncio side: a bounded buffer between the engine, which never waits, and a client, who may."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

from serve.errors import QueueFull, RequestAborted, RequestBroke, RequestError, ServeError, SlowReader, Unavailable
from serve.tracing.seam import RequestTrace
from serve.types import Event, Generation, PromptReady, RequestFailed, RequestId, SequenceFinished, TokensOut

StreamEvent = PromptReady | TokensOut | SequenceFinished


class Stream:
    """Asynchronous iterator over the events of one request.

    Owns the events that the engine has produced and the reader has not taken. Belongs to the
    event loop: every method is called on the loop's thread.

    A reader that lags sees the waiting tokens of one sequence as a single ``TokensOut``. The
    limit counts what the engine produced, merged or not; a reader who stays that far behind
    for ``slow_reader_seconds`` loses the call with ``SlowReader``.

    Always true: after the first of {last event of the request, failure, close} nothing more
    enters, and ``abort`` is called at most once, never after the engine ended the request.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        buffer_events: int,
        slow_reader_seconds: float,
        abort: Callable[[Stream, RequestError], None],
        over: Callable[[Stream], None],
        trace: RequestTrace | None = None,
    ) -> None:
        """Make a stream that waits for its first event.

        Args:
            generation: the request; its id names the stream.
            buffer_events: engine events the reader may be behind.
            slow_reader_seconds: how long it may stay that far behind.
            abort: tells the engine that nobody wants the rest.
            over: called once, when the reader has taken the end, or closed.
            trace: told of all that comes, where the request is traced.
        """
        self.generation = generation
        self.request_id: RequestId = generation.request_id
        self.trace_id = "" if trace is None else trace.trace_id
        """The trace that the request is a part of; empty where it is not traced."""
        self._trace = trace
        self.ended = False
        """No further event can enter: the request finished, failed, or was given up."""
        self._buffer_events = buffer_events
        self._slow_reader_seconds = slow_reader_seconds
        self._abort = abort
        self._over = over
        self._loop = asyncio.get_running_loop()
        self._items: deque[PromptReady | SequenceFinished | list[TokensOut]] = deque()
        self._lagging: dict[int, list[TokensOut]] = {}  # sequence index -> its unread list inside _items
        self._num_held = 0
        self._error: ServeError | None = None
        self._has_begun = False
        self._reader: asyncio.Future[None] | None = None
        self._slow_timer: asyncio.TimerHandle | None = None
        self._is_over = False

    @property
    def is_refused(self) -> bool:
        """Whether the request ended for want of room or service, before its prompt was computed."""
        return not self._has_begun and isinstance(self._error, (QueueFull, Unavailable))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        """The next event, waiting for it.

        Raises:
            StopAsyncIteration: the request is done and everything was read.
            ServeError: how the request failed, after the events that came before the failure.
        """
        while not self._items:
            if self.ended:
                self._finish()
                if self._error is None:
                    raise StopAsyncIteration
                raise self._error.with_traceback(None)
            await self._until_something_comes()
        return self._take()

    def feed(self, event: Event) -> None:
        """Append what the engine produced; ignored once the stream has ended."""
        if self.ended:
            return
        if self._trace is not None:
            self._trace.saw(event)
        if isinstance(event, RequestFailed):
            error = event.error
            self.fail(error if isinstance(error, ServeError) else RequestBroke(str(error)))
            return
        self._has_begun = True
        if isinstance(event, TokensOut):
            self._hold_tokens(event)
        else:
            self._items.append(event)
            if isinstance(event, SequenceFinished):
                self._lagging.pop(event.index, None)
                self.ended = event.request_done
        self._num_held += 1
        if self._num_held >= self._buffer_events and self._slow_timer is None and not self.ended:
            self._slow_timer = self._loop.call_later(self._slow_reader_seconds, self._give_up_on_slow_reader)
        self._settle()

    def fail(self, error: ServeError) -> None:
        """End the request with ``error``, which the reader meets after the events already held."""
        if self.ended:
            return
        if self._trace is not None:
            self._trace.failed(error)
        self._error = error
        self.ended = True
        self._settle()

    def cut(self, error: RequestError) -> None:
        """Give the request up: free what it holds in the engine, drop what is unread, and let the reader meet ``error``."""
        if self.ended:
            return
        self._items.clear()
        self._lagging.clear()
        self._num_held = 0
        self.fail(error)
        self._abort(self, error)

    def close(self) -> None:
        """The reader has gone. Aborts the request if it has not ended; calling it again does nothing."""
        self.cut(RequestAborted("the call was cancelled"))
        self._finish()

    def _hold_tokens(self, event: TokensOut) -> None:
        unread = self._lagging.get(event.index)
        if unread is None:
            self._lagging[event.index] = unread = []
            self._items.append(unread)
        unread.append(event)

    def _take(self) -> StreamEvent:
        item = self._items.popleft()
        if isinstance(item, list):
            if self._lagging.get(item[0].index) is item:
                del self._lagging[item[0].index]
            self._num_held -= len(item)
            taken: StreamEvent = _merged(item)
        else:
            self._num_held -= 1
            taken = item
        if self._num_held < self._buffer_events:
            self._stop_slow_timer()
        if self.ended and not self._items and self._error is None:
            self._finish()
        return taken

    async def _until_something_comes(self) -> None:
        assert self._reader is None, "a stream has one reader"
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _settle(self) -> None:
        """Wake the reader; an ended stream needs no timer."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        if self.ended:
            self._stop_slow_timer()

    def _stop_slow_timer(self) -> None:
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None

    def _give_up_on_slow_reader(self) -> None:
        self.cut(
            SlowReader(
                f"the client stayed {self._buffer_events} events behind for {self._slow_reader_seconds:g} s; the call was ended"
            )
        )

    def _finish(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._trace is not None:
                self._trace.over()
            self._over(self)


def _merged(events: list[TokensOut]) -> TokensOut:
    """Consecutive outputs of one sequence as one."""
    if len(events) == 1:
        return events[0]
    return TokensOut(
        request_id=events[0].request_id,
        index=events[0].index,
        text="".join(event.text for event in events),
        token_ids=tuple(id_ for event in events for id_ in event.token_ids),
        logprobs=tuple(logprob for event in events for logprob in event.logprobs),
    )
