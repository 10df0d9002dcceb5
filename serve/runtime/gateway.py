"""The one object the RPC layer talks to: whether the server serves, and a stream for each request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import ParamSpec

from serve.engine.engine import Engine
from serve.engine.executor import Executor, ModelFacts
from serve.engine.stats import EngineStats
from serve.errors import Draining, EngineDown, Loading, ProfileRefused, RequestAborted, ServeError, StartError
from serve.metrics import Metrics
from serve.runtime.commands import Abort, Add, Drop, FlushPrefixCache
from serve.runtime.edition import Edition
from serve.runtime.engine_thread import Delivery, EngineThread
from serve.runtime.flight import Flight
from serve.runtime.profiles import Part, Profiles
from serve.runtime.reload import Reload
from serve.runtime.seams import RankGroup
from serve.runtime.state import ServerState, State
from serve.runtime.stream import Stream
from serve.runtime.supervisor import Supervisor
from serve.tracing.seam import NoTracing, Tracing
from serve.types import Generation, RequestId

LAG_PROBE_SECONDS = 0.5

P = ParamSpec("P")


class Gateway:
    """Owns the server's state and the live streams; hides the engine's thread and the ranks behind them.

    Belongs to the event loop: made, called and read on its thread. Requests are in flight from
    ``start`` until their stream was read to its end or closed.
    """

    def __init__(
        self,
        *,
        edition: Edition,
        reopen: Callable[[], Awaitable[Edition]],
        make_group: Callable[[Edition], RankGroup],
        make_engine: Callable[[Edition, ModelFacts, Executor], Engine],
        metrics: Metrics,
        clock: Callable[[], float],
        tracing: Tracing | None = None,
    ) -> None:
        """Wire the threads without starting them.

        Args:
            edition: what to serve.
            reopen: reads the model's folder again for a reload and proves that it can be served; may raise ``StartError``.
            make_group: makes the ranks' handle; called once for every life of the engine.
            make_engine: makes the engine on ranks that are ready.
            metrics: told of everything.
            clock: monotonic seconds, the same that ``Generation.deadline_seconds`` is on.
            tracing: told of every request; nobody is without it.
        """
        self.config = edition.config
        """The server's options. A reload changes nothing of them but which checkpoint ``model.path`` is."""
        self._loop = asyncio.get_running_loop()
        self._metrics = metrics
        self._tracing = tracing or NoTracing()
        self._server = ServerState(edition)
        self._server.on_change(lambda state: metrics.server_entered(state.value))
        self._flight = Flight()
        self._draining: asyncio.Task[None] | None = None
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
        self._reload = Reload(
            self._server, self._flight, self._supervisor, metrics, reopen=reopen, drain_seconds=self.config.rpc.drain_seconds
        )
        self._profiles = Profiles(self._supervisor.profiling)

    @property
    def state(self) -> State:
        return self._server.now

    @property
    def edition(self) -> Edition:
        """What is served; before the model is loaded, what will be."""
        return self._server.edition

    @property
    def facts(self) -> ModelFacts | None:
        """What the ranks said when they were last ready."""
        return self._server.facts

    @property
    def num_in_flight(self) -> int:
        return len(self._flight)

    @property
    def is_live(self) -> bool:
        """Whether the threads behind it run, whatever they do; False means that only a new process helps."""
        return self._supervisor.is_alive and not self._bridge.is_stuck

    def on_state_change(self, callback: Callable[[State], None]) -> None:
        """Call ``callback`` with every state entered from now on, on the loop's thread."""
        self._server.on_change(callback)

    # What the RPC layer asks for.

    def start(self, generation: Generation, edition: Edition | None = None) -> Stream:
        """Put a request in the engine's queue.

        Args:
            generation: the request.
            edition: what it was made for; ``None`` if it does not matter.

        Raises:
            Loading, EngineDown, Draining: the server takes no requests now, or serves another edition by now.
            QueueFull: the queue is full, together with the requests that the engine has not looked at yet.

        The stream's first event may still be ``QueueFull``, ``DuplicateRequest`` or ``InvalidRequest``, from the engine.
        """
        self._refuse_for(self._server.refusal(edition) or self._bridge.refusal(generation))
        return self._admit(generation)

    @contextlib.contextmanager
    def call(self, edition: Edition | None = None) -> Iterator[Callable[[Generation], Stream]]:
        """A call of several requests, in flight as one: a drain waits for it and takes what it starts later.

        Yields:
            What starts one of its requests, and raises as ``start`` does.

        Raises:
            Loading, EngineDown, Draining: as for ``start``.
        """
        self._refuse_for(self._server.refusal(edition))
        with self._flight.call() as call:

            def start(generation: Generation) -> Stream:
                self._refuse_for(call.error or self._bridge.refusal(generation))
                return self._admit(generation)

            yield start

    def abort(self, request_id: RequestId) -> asyncio.Future[bool]:
        """End a live request, whoever started it, with ``RequestAborted``. False if there is no such request.

        The engine is told at once, whether or not its answer is waited for.
        """
        found: Future[bool] = Future()
        if not (self._server.has_engine or self._server.waits_for_engine) or not self._flight or self._reload.is_in_hand:
            found.set_result(False)
        else:
            self._bridge.send(Abort(request_id, RequestAborted("the request was aborted by an administrator"), found))
        return asyncio.wrap_future(found)

    async def flush_prefix_cache(self) -> int:
        """Forget every cached block that no sequence holds. Returns how many there were.

        Raises:
            Loading, EngineDown, Draining: there is no engine.
        """
        self._server.require_engine()
        num_dropped: Future[int] = Future()
        self._bridge.send(FlushPrefixCache(num_dropped))
        return await asyncio.wrap_future(num_dropped)

    async def load(self) -> EngineStats:
        """The engine's figures after its latest step or command, for a caller that awaits them.

        Raises:
            Loading, EngineDown, Draining: there is no engine.
        """
        return self.stats()

    def stats(self) -> EngineStats:
        """The engine's figures after its latest step or command.

        Raises:
            Loading, EngineDown, Draining: there is no engine.
        """
        self._server.require_engine()
        stats = self._bridge.stats
        if stats is None:
            raise Loading("the model is being loaded")
        return stats

    async def drain(self) -> None:
        """Take no more requests and wait for those in flight, ``rpc.drain_seconds`` at most; the rest ends with ``Draining``.

        Enters DRAINING before it first waits; lasts ``rpc.drain_least_seconds`` at least. Called again, it waits for the drain
        that goes on.
        """
        if self._draining is None:
            self._server.enter(State.DRAINING)
            if not self._reload.is_in_hand:
                self._reload.cancel()  # its calls have the drain's time now, not what it had left
            self._draining = asyncio.create_task(self._drain())
        await asyncio.shield(self._draining)

    async def reload(self) -> None:
        """Serve what the model's folder holds by now, or raise why not: see ``Reload.run``."""
        await self._reload.run()

    def profile(self, steps: int, ranks: Sequence[int], seconds: float) -> AsyncGenerator[Part, None]:
        """Have ranks record their next steps; see ``Profiles.record``.

        Raises:
            Loading, EngineDown, Draining: there is no engine.
            ProfileRefused: the model is being loaded again.
        """
        self._server.require_engine()
        if self._reload.goes_on:
            raise ProfileRefused("the model is being loaded again; ask when that has ended")
        return self._profiles.record(steps, ranks, seconds)

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
        await self._server.until_serving()

    async def until_given_up(self) -> StartError:
        """Wait for the error after which the server cannot go on."""
        return await self._server.until_given_up()

    async def stop(self) -> None:
        """End every stream that is left with ``Draining`` and stop the threads and the ranks."""
        if self.state is State.STOPPED:
            return
        self._server.enter(State.STOPPED)
        self._flight.cut_all(Draining("the server is stopping"))
        if self._draining is not None:
            self._draining.cancel()
        self._reload.cancel()
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

    def weights_taken(self, edition: Edition, facts: ModelFacts) -> None:
        """The ranks compute with the weights of another edition. Any thread."""
        self._post(self._on_weights, edition, facts)

    def taken_back(self, error: StartError) -> None:
        """A reload has failed, and the edition before it is being loaded. Any thread."""
        self._post(self._reload.taken_back, error)

    def gave_up(self, error: StartError) -> None:
        """There will be no engine again. Any thread."""
        self._post(self._on_end, error)

    def _on_up(self, edition: Edition, facts: ModelFacts) -> None:
        if self._reload.is_outdated(edition):
            return
        before = self.edition
        self._server.serve(edition, facts)
        self._metrics.checkpoint_served(edition.written_seconds)
        if before is not edition:
            before.release()
        self._reload.settle()

    def _on_weights(self, edition: Edition, facts: ModelFacts) -> None:
        before = self.edition
        self._server.take_weights(edition, facts)
        self._metrics.checkpoint_served(edition.written_seconds)
        before.release()

    def _on_down(self, error: EngineDown) -> None:
        self._server.enter(State.DOWN)
        if not self.config.supervisor.requeue:
            self._flight.fail_all(error)

    def _on_end(self, error: StartError) -> None:
        self._server.enter(State.DOWN)
        self._flight.fail_all(EngineDown("the engine could not be brought back"))
        self._reload.gave_up(error)
        self._server.give_up(error)

    # Inside.

    def _refuse_for(self, reason: ServeError | None) -> None:
        """Raise the reason, if there is one, and count it."""
        if reason is not None:
            self._metrics.rejected(reason)
            raise reason

    def _admit(self, generation: Generation) -> Stream:
        stream = Stream(
            generation,
            buffer_events=self.config.rpc.stream_buffer_events,
            slow_reader_seconds=self.config.rpc.slow_reader_seconds,
            abort=lambda stream, error: self._bridge.send(Drop(stream, error)),
            over=self._flight.remove,
            trace=self._tracing.request(generation),
        )
        self._flight.add(stream)
        self._bridge.send(Add(stream))
        return stream

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
        least = asyncio.create_task(asyncio.sleep(self.config.rpc.drain_least_seconds))
        try:
            await self._flight.until_over(at_most_seconds=self.config.rpc.drain_seconds, error=late)
            await least
        finally:
            least.cancel()

    def _probe_lag(self, due_seconds: float) -> None:
        now = self._loop.time()
        self._metrics.event_loop_lag(now - due_seconds)
        self._lag_probe = self._loop.call_at(now + LAG_PROBE_SECONDS, self._probe_lag, now + LAG_PROBE_SECONDS)


def _deliver(deliveries: list[Delivery]) -> None:
    for stream, event in deliveries:
        stream.feed(event)
