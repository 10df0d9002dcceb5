"""The engine's side of the bridge between one thread that computes and an event loop that talks to clients.

In: commands through a thread-safe queue. Out: the events of a step, all in one call. Nothing here waits for a client.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from serve.engine.admission import Admission
from serve.engine.engine import Engine
from serve.engine.stats import EngineStats
from serve.engine.swap import Swapped
from serve.errors import EngineDown, QueueFull, RequestBroke, RequestError, ServeError
from serve.metrics import Metrics
from serve.runtime.commands import Abort, Add, Command, Drop, FlushPrefixCache, SwapWeights, Wake
from serve.runtime.ledger import Ledger
from serve.runtime.stream import Stream
from serve.types import Event, Generation, RequestFailed, RequestId, SequenceFinished

Delivery = tuple[Stream, Event]
T = TypeVar("T")

STUCK_SECONDS = 30.0
"""A loop that for so long has something to do and gets nowhere, while no step is computed, hangs."""
STALLED_WAIT_SECONDS = 0.05
"""How long to wait for a command when the engine has work but none that can be done now."""

_log = logging.getLogger(__name__)


class EngineThread:
    """Owns the engine while it runs, and knows which stream each live request answers to.

    One thread, the supervisor's, calls ``take``, ``run`` and ``fail``; ``send``, ``refusal``, ``stats``, ``is_stuck`` and the
    ``step_started_seconds`` are for any thread.

    Always true between two iterations: every request that is alive in the engine has a route,
    and its last event removes the route.
    """

    def __init__(self, *, deliver: Callable[[list[Delivery]], None], metrics: Metrics, clock: Callable[[], float]) -> None:
        """Make a bridge with no engine yet.

        Args:
            deliver: hands a step's events to the event loop; must not block.
            metrics: told of every accepted request and every step.
            clock: monotonic seconds.
        """
        self._deliver = deliver
        self._metrics = metrics
        self._clock = clock
        self._ledger = Ledger(metrics, clock)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Rings when a command has come."""
        weakref.finalize(self, os.close, self._bell)
        self._routes: dict[RequestId, Stream] = {}
        self._outbox: list[Delivery] = []
        self._swap_done: Future[Swapped] | None = None
        self.stats: EngineStats | None = None
        """The engine's latest figures; ``None`` before the first engine runs."""
        self.step_started_seconds: float | None = None
        """When the step in progress began; ``None`` between steps."""
        self._admission: Admission | None = None
        self._sent = self._taken = (0, 0)
        """Requests, and tokens of their prompts, that were sent here; and those the engine was given or will never be."""
        self._progressed_seconds: float | None = None
        """When the loop last got anywhere; ``None`` while it has nothing to do, or there is no engine."""

    def send(self, command: Command) -> None:
        """Queue a command. Any thread; requests come from one."""
        if isinstance(command, Add):
            self._sent = _plus(self._sent, command)
        self._commands.put(command)
        os.eventfd_write(self._bell, 1)

    def refusal(self, generation: Generation) -> QueueFull | None:
        """What the engine would refuse a request with that were sent now; ``None`` where it may take it. Any thread.

        A request that is refused so need not wait until the step that is being computed has ended.
        """
        if self._admission is None:
            return None
        taken = self._taken  # read before the other, so that the difference is none of what was never sent
        coming = self._sent[0] - taken[0], self._sent[1] - taken[1]
        return self._admission.refusal(generation, coming)

    @property
    def backlog(self) -> int:
        """Commands the engine thread has not looked at yet. Any thread."""
        return self._commands.qsize()

    @property
    def is_stuck(self) -> bool:
        """Whether the loop hangs in itself, or goes round and gets nowhere; a step that hangs is the supervisor's to see.
        Any thread.
        """
        if self.step_started_seconds is not None:
            return False
        progressed = self._progressed_seconds  # read after the other, which a step that ends changes last
        return progressed is not None and self._clock() - progressed > STUCK_SECONDS

    def take(self, engine: Engine) -> None:
        """Have ``engine`` as the next to run: its figures and its room are known from now on, before a client hears of it."""
        self.stats = engine.stats()
        self._admission = engine.admission

    def run(self, engine: Engine, should_leave: Callable[[], bool]) -> None:
        """Serve with ``engine``, the one taken last, until ``should_leave``.

        That is asked between steps; send ``Wake`` to have it asked now.

        Raises:
            ExecutorDied: the ranks are lost; call ``fail`` next.
            Exception: a defect of the engine; treat it the same way.
        """
        self._progressed_seconds = self._clock()
        try:
            while True:
                self._overtake(engine)  # of several that came at once, one has overtaken the step and been answered
                while engine.await_planning(self._bell):
                    self._take_commands(engine)
                    if should_leave():
                        return
                    self._overtake(engine)
                    self._publish()
                self._take_commands(engine)
                if should_leave():
                    return
                if engine.has_work:
                    self._step(engine)
                else:
                    self._progressed_seconds = self._clock()
                self._tell_swapped(engine)
                self.stats = engine.stats()
                self._metrics.engine_advanced(self.stats)
                self._publish()
        finally:
            self._progressed_seconds = None

    def fail(self, engine: Engine | None, error: RequestError) -> None:
        """End every live request and refuse every queued command with ``error``; the engine is not used again."""
        if engine is not None:
            try:
                self._collect(engine.fail_all(error))
            except Exception:
                _log.exception("the engine could not end its requests in order; they are ended without it")
        for request_id in tuple(self._routes):
            self._collect((RequestFailed(request_id=request_id, error=error),))
        done, self._swap_done = self._swap_done, None
        if done is not None:
            _refuse_answer(done, error)
        while True:
            try:
                self._refuse(self._commands.get_nowait(), error)
            except queue.Empty:
                break
        self._publish()

    def outlive(self, engine: Engine, error: RequestError, *, resume: bool) -> bool:
        """The ranks of ``engine`` are lost, and it will ``run`` again on others: what it has and what is queued waits for that.

        Args:
            error: ends those that cannot wait; see ``Engine.lose_ranks``.
            resume: whether those wait of which something was generated.

        Returns:
            False if the engine broke over it: call ``fail``.
        """
        try:
            engine.lose_ranks(error, resume=resume)
            self._collect(engine.drain_events())
        except Exception:
            _log.exception("the engine could not keep its requests")
            return False
        done, self._swap_done = self._swap_done, None
        if done is not None:
            _refuse_answer(done, error)
        self.stats = engine.stats()
        self._publish()
        return True

    def _overtake(self, engine: Engine) -> None:
        """Let something overtake the step under way. A plan that does not fit into the socket waits for that to end: so this
        counts as a part of it, for whoever watches over ranks that hang."""
        if not engine.is_computing:
            return
        self.step_started_seconds = self._clock()
        try:
            engine.overtake()
            self._progressed_seconds = self._clock()
        finally:
            self.step_started_seconds = None

    def _step(self, engine: Engine) -> None:
        steps_before = engine.stats().steps
        self.step_started_seconds = self._clock()
        try:
            events = engine.step()
            is_stalled = not events and engine.stats().steps == steps_before and engine.has_work and not engine.is_computing
            if not is_stalled:
                self._progressed_seconds = self._clock()
        finally:
            self.step_started_seconds = None
        self._collect(events)
        if is_stalled:
            self._wait(engine, STALLED_WAIT_SECONDS)

    def _take_commands(self, engine: Engine) -> None:
        """Obey everything in the queue; with nothing else to do, wait for the first command."""
        with contextlib.suppress(BlockingIOError):  # before the queue is looked at: what comes after this rings again
            os.eventfd_read(self._bell)
        if not engine.has_work and not self._outbox:
            self._wait(engine, None)
        for _ in range(self._commands.qsize()):
            self._obey(engine, self._commands.get())

    def _wait(self, engine: Engine, at_most_seconds: float | None) -> None:
        deadline = engine.next_deadline_seconds
        if deadline is not None:
            until_deadline = max(0.0, deadline - self._clock())
            at_most_seconds = until_deadline if at_most_seconds is None else min(at_most_seconds, until_deadline)
        rests = not engine.has_work
        if rests:
            self._progressed_seconds = None
        try:
            command = self._commands.get(timeout=at_most_seconds)
        except queue.Empty:
            return
        finally:
            if rests:
                self._progressed_seconds = self._clock()
        self._obey(engine, command)

    def _obey(self, engine: Engine, command: Command) -> None:
        match command:
            case Add(stream=stream):
                # First, or it would be counted twice for a moment, and another refused that may wait.
                self._taken = _plus(self._taken, command)
                self._add(engine, stream)
            case Drop(stream=stream, error=error):
                if self._routes.get(stream.request_id) is stream:
                    self._abort(engine, stream.request_id, error)
            case Abort(request_id=request_id, error=error, found=found):
                _answer(found, self._abort(engine, request_id, error))
            case FlushPrefixCache(num_dropped=num_dropped):
                _answer(num_dropped, engine.flush_prefix_cache())
            case SwapWeights(swap=swap, is_meant=is_meant, done=done):
                if is_meant():
                    engine.swap(swap)
                    self._swap_done = done
                else:
                    _refuse_answer(done, EngineDown("the ranks that had prepared these weights are gone"))
            case Wake():
                pass

    def _tell_swapped(self, engine: Engine) -> None:
        swapped = engine.take_swapped()
        if swapped is not None:
            done, self._swap_done = self._swap_done, None
            assert done is not None, "weights were exchanged that nobody asked for"
            self._metrics.swap_ended(swapped)
            _answer(done, swapped)

    def _add(self, engine: Engine, stream: Stream) -> None:
        if stream.ended:  # given up while it waited in the queue
            return
        request_id = stream.request_id
        try:
            engine.add(stream.generation)
        except ServeError as error:
            self._metrics.rejected(error)
            self._outbox.append((stream, RequestFailed(request_id=request_id, error=error)))
        except Exception:
            _log.exception("the engine could not take request %s", request_id, extra={"request_id": request_id})
            broke = RequestBroke("the engine could not take this request")
            self._outbox.append((stream, RequestFailed(request_id=request_id, error=broke)))
        else:
            self._routes[request_id] = stream
            self._ledger.accepted(stream.generation, stream.trace_id)

    def _abort(self, engine: Engine, request_id: RequestId, error: RequestError) -> bool:
        found = engine.abort(request_id, error)
        if found:
            # At once, not with the next step: the id may be used again by the next command.
            self._collect(engine.drain_events())
        return found

    def _collect(self, events: tuple[Event, ...]) -> None:
        for event in events:
            if isinstance(event, RequestFailed) and isinstance(event.error, RequestBroke):
                named = {"request_id": event.request_id}
                _log.error("request %s broke: %s", event.request_id, event.error, exc_info=event.error.__cause__, extra=named)
            self._ledger.saw(event)
            stream = self._routes.get(event.request_id)
            if stream is None:
                continue
            self._outbox.append((stream, event))
            if isinstance(event, RequestFailed) or (isinstance(event, SequenceFinished) and event.request_done):
                del self._routes[event.request_id]

    def _publish(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._deliver(outbox)

    def _refuse(self, command: Command, error: RequestError) -> None:
        match command:
            case Add(stream=stream):
                self._taken = _plus(self._taken, command)
                if not stream.ended:
                    self._metrics.rejected(error)
                    self._outbox.append((stream, RequestFailed(request_id=stream.request_id, error=error)))
            case Abort(found=found):
                _answer(found, False)
            case FlushPrefixCache(num_dropped=num_dropped):
                _refuse_answer(num_dropped, error)
            case SwapWeights(done=done):
                _refuse_answer(done, error)
            case Drop() | Wake():
                pass


def _plus(counted: tuple[int, int], command: Add) -> tuple[int, int]:
    return counted[0] + 1, counted[1] + len(command.stream.generation.prompt_ids)


def _refuse_answer(future: Future[T], error: RequestError) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def _answer(future: Future[T], value: T) -> None:
    """Set a result unless the asker has given up."""
    if future.set_running_or_notify_cancel():
        future.set_result(value)
