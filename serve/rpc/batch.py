"""Many requests on one call: each runs by itself, and their events share the way back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from serve.config import ServerConfig
from serve.errors import EngineDown, RequestBroke, RequestError
from serve.rpc import messages
from serve.rpc.decoding import Malformed
from serve.runtime.stream import Stream
from serve.types import Event, Generation, SequenceFinished
from serve.v1 import inference_pb2

Start = Callable[[inference_pb2.GenerateRequest], Awaitable[tuple[Generation, Stream]]]

_log = logging.getLogger(__name__)

EVENTS_AHEAD: Final = 256
"""Events that wait for a client which reads slowly; behind them the streams' own buffers fill and limits apply."""


async def run_batch(
    requests: AsyncIterator[inference_pb2.GenerateRequest | Malformed],
    start: Start,
    heard: Callable[[Event], None],
    leave: Callable[[Stream], None],
    config: ServerConfig,
) -> AsyncIterator[inference_pb2.GenerateEvent]:
    """Events of all requests, as they come.

    Requests are read as fast as there is room for them: a client may send more than the server's queue holds. A request
    that fails ends with an error event, whatever failed: each has one last event.

    Args:
        heard: told of every event.
        leave: ends a stream that nobody reads any more.

    Raises:
        EngineDown: the engine died; the requests it took along have had their error events.
    """
    batch = _Batch(start, heard, leave, room=min(2 * config.scheduler.max_num_seqs, config.admission.max_queued_requests))
    reading = asyncio.create_task(batch.read(requests))
    try:
        while (message := await batch.events.get()) is not None:
            yield message
        await reading
    finally:
        reading.cancel()
        batch.cancel()
    if batch.engine_down is not None:
        raise batch.engine_down


class _Batch:
    """The requests of one call that are running."""

    def __init__(self, start: Start, heard: Callable[[Event], None], leave: Callable[[Stream], None], *, room: int) -> None:
        self.events: asyncio.Queue[inference_pb2.GenerateEvent | None] = asyncio.Queue(EVENTS_AHEAD)
        """``None`` is the end: every request was read, and has ended."""
        self.engine_down: EngineDown | None = None
        self._start = start
        self._heard = heard
        self._leave = leave
        self._room = asyncio.Semaphore(room)
        self._running: set[asyncio.Task[None]] = set()

    async def read(self, requests: AsyncIterator[inference_pb2.GenerateRequest | Malformed]) -> None:
        """Start every request the client sends, each read once there is room for it; returns when all have ended."""
        try:
            await self._room.acquire()
            async for request in requests:
                if self.engine_down is not None:
                    break
                task = asyncio.create_task(self._run(request))
                self._running.add(task)
                task.add_done_callback(self._ended)
                await self._room.acquire()
                if self.engine_down is not None:
                    break
            while self._running:
                await asyncio.wait(self._running)
        finally:
            if not asyncio.current_task().cancelling():  # type: ignore[union-attr]  # a coroutine always runs in a task
                await self.events.put(None)

    def cancel(self) -> None:
        """Give up what is running; each request frees what it holds."""
        for task in self._running:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._room.release()

    async def _run(self, request: inference_pb2.GenerateRequest | Malformed) -> None:
        """One request, from its start to its one last event."""
        is_over = False
        try:
            if isinstance(request, Malformed):
                raise request.error
            generation, stream = await self._start(request)
            try:
                async for event in stream:
                    self._heard(event)
                    if messages.says_something(event, generation):
                        await self.events.put(await messages.event_message(event, generation))
                    is_over = isinstance(event, SequenceFinished) and event.request_done
            finally:
                self._leave(stream)
        except RequestError as error:
            if isinstance(error, EngineDown):
                self.engine_down = error
            await self.events.put(messages.error_event(request.request_id, error))
        except Exception:
            _log.exception("request %s of a batch failed", request.request_id, extra={"request_id": request.request_id})
            broke = RequestBroke("the server failed on this request; its log says why")
            if not is_over:
                await self.events.put(messages.error_event(request.request_id, broke))
