"""The one object the RPC layer talks to: whether the server serves, and a stream for each request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import ParamSpec

from serve.engine.engine import Engine
from serve.engine.executor import Executor, ModelFacts
from serve.engine.stats import EngineStats
from serve.errors import (
    Draining,
    EngineDown,
    Loading,
    QueueFull,
    ReloadRefused,
    RequestAborted,
    StartError,
    Unavailable,
)
from serve.metrics import Metrics
from serve.runtime.commands import Abort, Add, Drop, FlushPrefixCache
from serve.runtime.edition import Edition
from serve.runtime.engine_thread import Delivery, EngineThread
from serve.runtime.flight import Flight
from serve.runtime.stream import Stream
from serve.runtime.supervisor import RankGroup, Supervisor
from serve.types import Generation, RequestId

LAG_PROBE_SECONDS = 0.5

P = ParamSpec("P")

_log = logging.getLogger(__name__)


class State(Enum):
    """What the server does with a new generation request."""

    LOADING = "loading"
    """The model is not loaded yet, or is about to be loaded again: refused with ``Loading``; those in flight go on."""
    SERVING = "serving"
    DRAINING = "draining"
    """Refused with ``Draining``; those in flight go on. Never left but for STOPPED."""
    DOWN = "down"
    """A rank died and the supervisor brings the engine back: refused with ``EngineDown``."""
    STOPPED = "stopped"
    """Refused with ``Draining``; nothing is left."""


@dataclass(slots=True)
class _Reload:
    """An exchange of editions that the supervisor has in hand."""

    edition: Edition
    settled: asyncio.Future[None]
    """Done when there is an engine again, or never will be."""
    error: StartError | None = None
    """Why it is not this edition's."""


class Gateway:
    """Owns the server's state and the live streams; hides the engine's thread and the ranks behind them.

    Belongs to the event loop: made, called and read on its thread. Requests are in flight from
    ``start`` until their stream was read to its end or closed.
    """

    def __init__(
        self,
        *,
        edition: Edition,
        reopen: Callable[[], Edition],
        make_group: Callable[[Edition], RankGroup],
        make_engine: Callable[[Edition, ModelFacts, Executor], Engine],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        """Wire the threads without starting them.

        Args:
            edition: what to serve.
            reopen: reads the model's folder again for a reload; called on a thread of its own, and may raise ``StartError``.
            make_group: makes the ranks' handle; called once for every life of the engine.
            make_engine: makes the engine on ranks that are ready.
            metrics: told of everything.
            clock: monotonic seconds, the same that ``Generation.deadline_seconds`` is on.
        """
        self.edition = edition
        """What is served; before the model is loaded, what will be."""
        self.config = edition.config
        """The server's options. A reload changes nothing of them but which checkpoint ``model.path`` is."""
        self.facts: ModelFacts | None = None
        """What the ranks said when they were last ready."""
        self._reopen = reopen
        self._state = State.LOADING
        self._loop = asyncio.get_running_loop()
        self._metrics = metrics
        self._clock = clock
        self._flight = Flight()
        self._listeners: list[Callable[[State], None]] = []
        self._serving = asyncio.Event()
        self._end: asyncio.Future[StartError] = self._loop.create_future()
        self._draining: asyncio.Task[None] | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._reload: _Reload | None = None
        self._lag_probe: asyncio.TimerHandle | None = None
        self._bridge = EngineThread(deliver=self._deliver_soon, metrics=metrics, clock=clock)
        self._supervisor = Supervisor(
            edition,
            make_group=make_group,
            make_engine=make_engine,
            bridge=self._bridge,
            listener=self,
            metrics=metrics,
            clock=clock,
        )

    @property
    def state(self) -> State:
        return self._state

    @property
    def num_in_flight(self) -> int:
        return len(self._flight)

    def on_state_change(self, callback: Callable[[State], None]) -> None:
        """Call ``callback`` with every state entered from now on, on the loop's thread."""
        self._listeners.append(callback)

    # What the RPC layer asks for.

    def start(self, generation: Generation, edition: Edition | None = None) -> Stream:
        """Put a request in the engine's queue.

        Args:
            generation: the request.
            edition: what it was made for; ``None`` if it does not matter.

        Raises:
            Loading, EngineDown, Draining: the server takes no requests now, or serves another edition by now.
            QueueFull: so many requests wait to be looked at that the queue is full beyond doubt.

        The stream's first event may still be ``QueueFull``, ``DuplicateRequest`` or ``InvalidRequest``, from the engine.
        """
        refusal = self._unavailable() or self._mismatch(edition) or self._overload()
        if refusal is not None:
            self._metrics.rejected(refusal)
            raise refusal
        return self._start(generation)

    @contextlib.contextmanager
    def call(self, edition: Edition | None = None) -> Iterator[Callable[[Generation], Stream]]:
        """A call of several requests, in flight as one: a drain waits for it and takes what it starts later.

        Yields:
            What starts one of its requests, and raises as ``start`` does.

        Raises:
            Loading, EngineDown, Draining: as for ``start``.
        """
        refusal = self._unavailable() or self._mismatch(edition)
        if refusal is not None:
            self._metrics.rejected(refusal)
            raise refusal
        with self._flight.call() as call:

            def start(generation: Generation) -> Stream:
                refusal = call.error or self._overload()
                if refusal is not None:
                    self._metrics.rejected(refusal)
                    raise refusal
                return self._start(generation)

            yield start

    async def abort(self, request_id: RequestId) -> bool:
        """End a live request, whoever started it, with ``RequestAborted``. False if there is no such request."""
        if self._state not in (State.LOADING, State.SERVING, State.DRAINING) or not self._flight or self._reload is not None:
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
            if self._reloading is not None and self._reload is None:
                self._reloading.cancel()  # its calls have the drain's time now, not what it had left
            self._draining = asyncio.create_task(self._drain())
        await asyncio.shield(self._draining)

    async def reload(self) -> None:
        """Read the model's folder again and serve what is in it now: its newest checkpoint, for a folder of several.

        Calls in flight have ``rpc.drain_seconds`` to end; the rest ends with ``Loading``. A folder that cannot be read is found
        out before anything is given up; a model that the ranks refuse is found out later, and the one before is loaded again.

        Raises:
            Loading, EngineDown, Draining: there is no model to replace, or the server is going away.
            ReloadRefused: a reload goes on already, or the folder cannot be served; the edition before it is.
        """
        if self._reloading is not None:
            raise ReloadRefused("the model is being loaded again already; ask when that has ended")
        unavailable = self._unavailable()
        if unavailable is not None:
            raise unavailable
        task = self._reloading = asyncio.create_task(self._exchange())
        self._reloading.add_done_callback(self._reload_ended)
        await asyncio.wait((task,))  # the reload goes on when its caller has gone
        if task.cancelled():
            raise Draining("the server is going away")
        task.result()

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
        self._flight.cut_all(Draining("the server is stopping"))
        for task in (self._draining, self._reloading):
            if task is not None:
                task.cancel()
        if self._lag_probe is not None:
            self._lag_probe.cancel()
        await asyncio.to_thread(self._supervisor.stop)

    # What the supervisor's threads report (a LifeListener).

    def engine_up(self, edition: Edition, facts: ModelFacts) -> None:
        """The ranks are ready. Any thread."""
        self._post(self._on_up, edition, facts)

    def engine_down(self, error: EngineDown) -> None:
        """The ranks are lost. Any thread."""
        self._post(self._on_down, error)

    def taken_back(self, error: StartError) -> None:
        """A reload has failed, and the edition before it is being loaded. Any thread."""
        self._post(self._on_taken_back, error)

    def gave_up(self, error: StartError) -> None:
        """There will be no engine again. Any thread."""
        self._post(self._on_end, error)

    def _on_up(self, edition: Edition, facts: ModelFacts) -> None:
        if self._reload is not None and self._reload.edition is not edition and self._reload.error is None:
            return  # news from before the exchange
        self.edition, self.facts = edition, facts
        self._enter(State.SERVING)
        if self._state is State.SERVING:
            self._serving.set()
        self._settle_reload()

    def _on_down(self, error: EngineDown) -> None:
        self._enter(State.DOWN)
        self._flight.fail_all(error)

    def _on_taken_back(self, error: StartError) -> None:
        if self._reload is not None:  # else the server is stopping
            self._reload.error = error

    def _on_end(self, error: StartError) -> None:
        self._enter(State.DOWN)
        self._flight.fail_all(EngineDown("the engine could not be brought back"))
        if self._reload is not None:
            self._reload.error = self._reload.error or error
            self._settle_reload()
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

    def _start(self, generation: Generation) -> Stream:
        stream = Stream(
            generation,
            buffer_events=self.config.rpc.stream_buffer_events,
            slow_reader_seconds=self.config.rpc.slow_reader_seconds,
            abort=lambda stream, error: self._bridge.send(Drop(stream, error)),
            over=self._flight.remove,
        )
        self._flight.add(stream)
        self._bridge.send(Add(generation, stream))
        return stream

    def _overload(self) -> QueueFull | None:
        limit = self.config.admission.max_queued_requests
        if self._bridge.backlog >= limit + self.config.scheduler.max_num_seqs:
            return QueueFull(f"{limit} requests are waiting already", reason="requests", retry_after_seconds=1.0)
        return None

    def _mismatch(self, edition: Edition | None) -> Loading | None:
        if edition is None or edition is self.edition:
            return None
        return Loading("the model was loaded again while this call was read; send it again")

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

    async def _drain(self) -> None:
        late = Draining("the server is stopping and this call did not end in time")
        await self._flight.until_over(at_most_seconds=self.config.rpc.drain_seconds, error=late)

    async def _exchange(self) -> None:
        """One reload."""
        try:
            edition = await asyncio.to_thread(self._reopen)
        except StartError as error:
            raise ReloadRefused(f"{error}; what was served before goes on") from error
        unavailable = self._unavailable()
        if unavailable is not None:
            raise unavailable
        late = Loading("the model is being loaded again and this call did not end in time")
        while self._state is State.SERVING:  # also again, if the ranks died meanwhile and are back
            self._enter(State.LOADING)
            await self._flight.until_over(at_most_seconds=self.config.rpc.drain_seconds, error=late)
        if self._end.done() or self._state in (State.DRAINING, State.STOPPED):
            raise self._unavailable() or Draining("the server is going away")
        self._reload = _Reload(edition, self._loop.create_future())
        try:
            await asyncio.to_thread(self._supervisor.reload, edition)  # it may have to wait for ranks to die
            await self._reload.settled
            failure = self._reload.error
        finally:
            self._reload = None
        if failure is not None and self._end.done():
            raise EngineDown(f"{failure}, and what was served before cannot be brought back") from failure
        if failure is not None:
            raise ReloadRefused(f"{failure}; what was served before is served again") from failure

    def _settle_reload(self) -> None:
        if self._reload is not None and not self._reload.settled.done():
            self._reload.settled.set_result(None)

    def _reload_ended(self, task: asyncio.Task[None]) -> None:
        self._reloading = None
        # Also where whoever asked for it has gone.
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("the model was not loaded again: %s", error)

    def _probe_lag(self, due_seconds: float) -> None:
        now = self._loop.time()
        self._metrics.event_loop_lag(now - due_seconds)
        self._lag_probe = self._loop.call_at(now + LAG_PROBE_SECONDS, self._probe_lag, now + LAG_PROBE_SECONDS)


def _deliver(deliveries: list[Delivery]) -> None:
    for stream, event in deliveries:
        stream.feed(event)
