"""The one object the RPC layer talks to: whether the server serves, and a stream for each request."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from typing import ParamSpec

from serve.config import ServerConfig
from serve.engine.engine import Engine
from serve.engine.executor import Executor, ModelFacts
from serve.engine.stats import EngineStats
from serve.errors import Draining, EngineDown, Loading, QueueFull, RequestAborted, RequestError, StartError, Unavailable
from serve.metrics import Metrics
from serve.runtime.commands import Abort, Add, Drop, FlushPrefixCache
from serve.runtime.engine_thread import Delivery, EngineThread
from serve.runtime.stream import Stream
from serve.runtime.supervisor import RankGroup, Supervisor
from serve.types import Generation, RequestId

LAG_PROBE_SECONDS = 0.5
FAREWELL_SECONDS = 1.0
"""After the drain's time is up: for readers to meet the error their streams end with."""

P = ParamSpec("P")

_log = logging.getLogger(__name__)


class State(Enum):
    """What the server does with a new generation request."""

    LOADING = "loading"
    """The model is not loaded yet: refused with ``Loading``."""
    SERVING = "serving"
    DRAINING = "draining"
    """Refused with ``Draining``; those in flight go on. Never left but for STOPPED."""
    DOWN = "down"
    """A rank died and the supervisor brings the engine back: refused with ``EngineDown``."""
    STOPPED = "stopped"
    """Refused with ``Draining``; nothing is left."""


class Gateway:
    """Owns the server's state and the live streams; hides the engine's thread and the ranks behind them.

    Belongs to the event loop: made, called and read on its thread. Requests are in flight from
    ``start`` until their stream was read to its end or closed.
    """

    def __init__(
        self,
        *,
        config: ServerConfig,
        make_group: Callable[[], RankGroup],
        make_engine: Callable[[ModelFacts, Executor], Engine],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        """Wire the threads without starting them.

        Args:
            config: the server's options.
            make_group: makes the ranks' handle; called once for every life of the engine.
            make_engine: makes the engine on ranks that are ready.
            metrics: told of everything.
            clock: monotonic seconds, the same that ``Generation.deadline_seconds`` is on.
        """
        self.config = config
        self.facts: ModelFacts | None = None
        """What the ranks said when they were last ready."""
        self._state = State.LOADING
        self._loop = asyncio.get_running_loop()
        self._metrics = metrics
        self._clock = clock
        self._live: set[Stream] = set()
        self._all_over = asyncio.Event()
        self._all_over.set()
        self._listeners: list[Callable[[State], None]] = []
        self._serving = asyncio.Event()
        self._end: asyncio.Future[StartError] = self._loop.create_future()
        self._draining: asyncio.Task[None] | None = None
        self._lag_probe: asyncio.TimerHandle | None = None
        self._bridge = EngineThread(deliver=self._deliver_soon, metrics=metrics, clock=clock)
        self._supervisor = Supervisor(
            config.supervisor,
            make_group=make_group,
            make_engine=make_engine,
            bridge=self._bridge,
            listener=self,
            metrics=metrics,
            model=config.model.served_name,
            clock=clock,
        )

    @property
    def state(self) -> State:
        return self._state

    @property
    def num_in_flight(self) -> int:
        return len(self._live)

    def on_state_change(self, callback: Callable[[State], None]) -> None:
        """Call ``callback`` with every state entered from now on, on the loop's thread."""
        self._listeners.append(callback)

    # What the RPC layer asks for.

    def start(self, generation: Generation) -> Stream:
        """Put a request in the engine's queue.

        Raises:
            Loading, EngineDown, Draining: the server takes no requests now.
            QueueFull: so many requests wait to be looked at that the queue is full beyond doubt.

        The stream's first event may still be ``QueueFull``, ``DuplicateRequest`` or ``InvalidRequest``, from the engine.
        """
        refusal = self._refusal()
        if refusal is not None:
            self._metrics.rejected(refusal)
            raise refusal
        stream = Stream(
            generation,
            buffer_events=self.config.rpc.stream_buffer_events,
            slow_reader_seconds=self.config.rpc.slow_reader_seconds,
            abort=lambda stream, error: self._bridge.send(Drop(stream, error)),
            over=self._forget,
        )
        self._live.add(stream)
        self._all_over.clear()
        self._bridge.send(Add(generation, stream))
        return stream

    async def abort(self, request_id: RequestId) -> bool:
        """End a live request, whoever started it, with ``RequestAborted``. False if there is no such request."""
        if self._state not in (State.SERVING, State.DRAINING):
            return False
        found: Future[bool] = Future()
        self._bridge.send(Abort(request_id, RequestAborted("the request was aborted by an administrator"), found))
        return await asyncio.wrap_future(found)

    async def flush_prefix_cache(self) -> int:
        """Forget every cached block that no sequence holds. Returns how many there were.

        Raises:
            Loading, EngineDown, Draining: there is no engine.
        """
        self._require_engine()
        num_dropped: Future[int] = Future()
        self._bridge.send(FlushPrefixCache(num_dropped))
        return await asyncio.wrap_future(num_dropped)

    async def load(self) -> EngineStats:
        """The engine's figures after its latest step or command.

        Raises:
            Loading, EngineDown, Draining: there is no engine.
        """
        self._require_engine()
        stats = self._bridge.stats
        if stats is None:
            raise Loading("the model is being loaded")
        return stats

    async def drain(self) -> None:
        """Take no more requests and wait for those in flight, ``rpc.drain_seconds`` at most; the rest ends with ``Draining``.

        Enters DRAINING before it first waits. Called again, it waits for the drain that goes on.
        """
        if self._draining is None:
            self._enter(State.DRAINING)
            self._draining = asyncio.create_task(self._drain())
        await asyncio.shield(self._draining)

    # What the composition root asks for.

    def launch(self) -> None:
        """Start the ranks, in the background."""
        self._probe_lag(self._loop.time())
        self._supervisor.start()

    async def until_serving(self) -> None:
        """Wait until the model is loaded.

        Raises:
            StartError: it cannot be.
        """
        serving = asyncio.ensure_future(self._serving.wait())
        try:
            await asyncio.wait((serving, self._end), return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
        if self._end.done():
            raise self._end.result()

    async def until_given_up(self) -> StartError:
        """Wait for the error after which the server cannot go on."""
        return await asyncio.shield(self._end)

    async def stop(self) -> None:
        """End every stream that is left with ``Draining`` and stop the threads and the ranks."""
        if self._state is State.STOPPED:
            return
        self._enter(State.STOPPED)
        self._cut_all(Draining("the server is stopping"))
        if self._draining is not None:
            self._draining.cancel()
        if self._lag_probe is not None:
            self._lag_probe.cancel()
        await asyncio.to_thread(self._supervisor.stop)

    # What the supervisor's threads report (a LifeListener).

    def engine_up(self, facts: ModelFacts) -> None:
        """The ranks are ready. Any thread."""
        self._post(self._on_up, facts)

    def engine_down(self, error: EngineDown) -> None:
        """The ranks are lost. Any thread."""
        self._post(self._on_down, error)

    def gave_up(self, error: StartError) -> None:
        """There will be no engine again. Any thread."""
        self._post(self._on_end, error)

    def _on_up(self, facts: ModelFacts) -> None:
        self.facts = facts
        self._enter(State.SERVING)
        if self._state is State.SERVING:
            self._serving.set()

    def _on_down(self, error: EngineDown) -> None:
        self._enter(State.DOWN)
        for stream in tuple(self._live):
            stream.fail(error)

    def _on_end(self, error: StartError) -> None:
        self._enter(State.DOWN)
        for stream in tuple(self._live):
            stream.fail(EngineDown("the engine could not be brought back"))
        if not self._end.done():
            self._end.set_result(error)

    # Inside.

    def _enter(self, state: State) -> None:
        """Change the state and tell everybody. A server that drains does not come back, whatever its engine does."""
        if state is self._state or self._state is State.STOPPED:
            return
        if self._state is State.DRAINING and state is not State.STOPPED:
            return
        _log.info("state: %s -> %s", self._state.value, state.value)
        self._state = state
        for listener in tuple(self._listeners):
            listener(state)

    def _refusal(self) -> RequestError | None:
        unavailable = self._unavailable()
        if unavailable is not None:
            return unavailable
        limit = self.config.admission.max_queued_requests
        if self._bridge.backlog >= limit + self.config.scheduler.max_num_seqs:
            return QueueFull(f"{limit} requests are waiting already", reason="requests", retry_after_seconds=1.0)
        return None

    def _unavailable(self) -> Unavailable | None:
        match self._state:
            case State.SERVING:
                return None
            case State.LOADING:
                return Loading("the model is being loaded")
            case State.DOWN:
                return EngineDown("the engine is being restarted, try again in a moment")
            case State.DRAINING | State.STOPPED:
                return Draining("the server is going away and takes no more requests")

    def _require_engine(self) -> None:
        unavailable = self._unavailable()
        if unavailable is not None and self._state is not State.DRAINING:
            raise unavailable

    def _deliver_soon(self, deliveries: list[Delivery]) -> None:
        self._post(_deliver, deliveries)

    def _post(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have the loop call ``function``; a loop that is gone has nobody left to tell."""
        try:
            self._loop.call_soon_threadsafe(functools.partial(function, *args, **kwargs))
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _forget(self, stream: Stream) -> None:
        self._live.discard(stream)
        if not self._live:
            self._all_over.set()

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self.config.rpc.drain_seconds):
                await self._all_over.wait()
        except TimeoutError:
            _log.warning("drain: %d requests did not end in time", len(self._live))
            self._cut_all(Draining("the server is stopping and this call did not end in time"))
            await self._farewell()

    async def _farewell(self) -> None:
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self._all_over.wait()
        except TimeoutError:
            _log.warning("drain: %d readers have gone silent", len(self._live))

    def _cut_all(self, error: Draining) -> None:
        for stream in tuple(self._live):
            stream.cut(error)

    def _probe_lag(self, due_seconds: float) -> None:
        now = self._loop.time()
        self._metrics.event_loop_lag(now - due_seconds)
        self._lag_probe = self._loop.call_at(now + LAG_PROBE_SECONDS, self._probe_lag, now + LAG_PROBE_SECONDS)


def _deliver(deliveries: list[Delivery]) -> None:
    for stream, event in deliveries:
        stream.feed(event)
