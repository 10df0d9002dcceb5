"""The bridge itself, without threads: what it hands over, and in how many pieces."""

from __future__ import annotations

import asyncio
import dataclasses
import select
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from serve.engine.engine import Engine, EngineLimits
from serve.engine.plan import StepPlan, StepResult
from serve.errors import EngineDown, RequestAborted, RequestBroke
from serve.metrics import Metrics
from serve.runtime.commands import Abort, Add, Command, FlushPrefixCache, Wake
from serve.runtime.engine_thread import STUCK_SECONDS, Delivery, EngineThread
from serve.runtime.stream import Stream
from serve.types import Event, Generation, RequestFailed, RequestId, SequenceFinished, TokensOut
from tests.serve.runtime.ranks import FACTS, PATIENCE_SECONDS, FakeRanks, IdText, expected_ids, request


class _WakingRanks(FakeRanks):
    """After each step, the thread looks whether it may leave."""

    def __init__(self, bridge: Bridge) -> None:
        super().__init__()
        self._bridge = bridge

    def execute(self, plan: StepPlan) -> StepResult:
        self._bridge.thread.send(Wake())
        return super().execute(plan)


class Bridge:
    """An EngineThread that runs in the test's own thread until it has nothing to do."""

    def __init__(self) -> None:
        self.deliveries: list[list[Delivery]] = []
        self.ranks = _WakingRanks(self)
        self.engine = make_engine(self.ranks)
        metrics = Metrics(version="0", num_ranks=2)
        metrics.engine_started(self.engine.stats(), FACTS, model="m")
        self.thread = EngineThread(deliver=self.deliveries.append, metrics=metrics, clock=time.monotonic)
        self.thread.take(self.engine)

    def run(self, *commands: Command, until: Callable[[], bool] | None = None) -> None:
        for command in commands:
            self.thread.send(command)
        self.thread.run(self.engine, should_leave=until or (lambda: not self.engine.has_work))

    def stream(self, generation: Generation) -> Stream:
        return stream_of(generation)

    def add(self, generation: Generation) -> Add:
        return Add(self.stream(generation))


def stream_of(generation: Generation) -> Stream:
    return Stream(generation, buffer_events=16, slow_reader_seconds=1, abort=lambda *_: None, over=lambda _: None)


def make_engine(
    ranks: FakeRanks, kind: type[Engine] = Engine, *, clock: Callable[[], float] = time.monotonic, **changed: int
) -> Engine:
    limits = EngineLimits(
        max_num_seqs=64, max_step_tokens=512, max_queued_requests=64, max_queued_tokens=10_000, prefix_caching=True
    )
    limits = dataclasses.replace(limits, **changed)
    return kind(facts=FACTS, limits=limits, executor=ranks, open_text=lambda *_: IdText(), clock=clock)


@pytest.fixture
async def bridge() -> Bridge:
    return Bridge()


async def test_the_events_of_a_step_are_handed_over_at_once(bridge: Bridge) -> None:
    adds = [bridge.add(request(f"r{n}", tokens=5)) for n in range(10)]
    bridge.run(*adds)
    assert len(bridge.deliveries) == 5, "one hand-over for each of the five steps"
    first, last = bridge.deliveries[0], bridge.deliveries[-1]
    assert sum(isinstance(event, TokensOut) for _, event in first) == 10
    assert sum(isinstance(event, SequenceFinished) for _, event in last) == 10
    assert {stream for stream, _ in last} == {add.stream for add in adds}


async def test_what_a_defect_of_add_breaks_is_that_request_alone(bridge: Bridge) -> None:
    good, bad = bridge.add(request("good")), bridge.add(request("bad", prompt_ids="no ids"))
    bridge.engine.add = _raise_for_text(bridge.engine.add)  # type: ignore[method-assign]
    bridge.run(bad, good)
    ends = {event.request_id: event for hand in bridge.deliveries for _, event in hand}
    failed = ends[RequestId("bad")]
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, RequestBroke)
    assert isinstance(ends[RequestId("good")], SequenceFinished)


def _raise_for_text(add: Callable[[Generation], None]) -> Callable[[Generation], None]:
    def adding(generation: Generation) -> None:
        if isinstance(generation.prompt_ids, str):
            raise TypeError("a defect")
        add(generation)

    return adding


async def test_a_dead_engine_answers_every_command_and_ends_every_request_once(bridge: Bridge) -> None:
    live = bridge.add(request("live", tokens=500))
    bridge.run(live, until=lambda: bridge.ranks.num_steps == 3)
    bridge.deliveries.clear()
    queued = bridge.add(request("queued"))
    found: Future[bool] = Future()
    dropped: Future[int] = Future()
    for command in (queued, Abort(RequestId("live"), RequestAborted(), found), FlushPrefixCache(dropped)):
        bridge.thread.send(command)
    bridge.thread.fail(bridge.engine, EngineDown("gone"))
    ended = [
        (stream, type(event.error)) for hand in bridge.deliveries for stream, event in hand if isinstance(event, RequestFailed)
    ]
    assert ended == [(live.stream, EngineDown), (queued.stream, EngineDown)]
    assert found.result(0) is False
    with pytest.raises(EngineDown):
        dropped.result(0)
    bridge.thread.fail(None, EngineDown("gone"))
    assert len([event for hand in bridge.deliveries for _, event in hand if isinstance(event, RequestFailed)]) == 2


async def test_an_engine_that_cannot_even_fail_loses_no_request(bridge: Bridge) -> None:
    live = bridge.add(request("live", tokens=500))
    bridge.run(live, until=lambda: bridge.ranks.num_steps == 3)

    def broken(error: Exception) -> tuple[()]:
        raise RuntimeError("a defect")

    bridge.engine.fail_all = broken  # type: ignore[method-assign, assignment]
    bridge.deliveries.clear()
    bridge.thread.fail(bridge.engine, EngineDown("gone"))
    assert [(stream, type(event)) for hand in bridge.deliveries for stream, event in hand] == [(live.stream, RequestFailed)]


async def test_an_asker_who_gave_up_harms_nobody(bridge: Bridge) -> None:
    asked = asyncio.wrap_future(future := Future[int]())
    asked.cancel()
    await asyncio.sleep(0)
    assert future.cancelled()
    bridge.run(FlushPrefixCache(future), bridge.add(request("r")))
    assert isinstance(bridge.deliveries[-1][-1][1], SequenceFinished)


class _Stalled(Engine):
    """An engine with a defect: it has work, and never does any."""

    def step(self) -> tuple[Event, ...]:
        return ()


@pytest.mark.parametrize("kind", [Engine, _Stalled])
async def test_an_engine_that_has_work_and_gets_nowhere_is_stuck_though_its_loop_goes_round(kind: type[Engine]) -> None:
    now, seen = [0.0], []
    metrics = Metrics(version="0", num_ranks=2)
    engine = make_engine(FakeRanks(), kind)
    metrics.engine_started(engine.stats(), FACTS, model="m")
    thread = EngineThread(deliver=lambda _: None, metrics=metrics, clock=lambda: now[0])

    def should_leave() -> bool:
        seen.append(thread.is_stuck)
        now[0] += STUCK_SECONDS * 0.6
        return len(seen) == 5

    thread.send(Add(stream_of(request(tokens=50))))
    thread.take(engine)
    thread.run(engine, should_leave)
    assert seen == ([False, False, True, True, True] if kind is _Stalled else [False] * 5)
    assert not thread.is_stuck, "it has no engine by now"


class _RungFor(FakeRanks):
    """Ranks that another tenant's request comes to while they compute a flood's step, which takes a second of their clock."""

    def __init__(self) -> None:
        super().__init__(num_ranks=1)
        self.seconds = 0.0
        self.in_the_middle: Callable[[], None] | None = None
        self.launched_early: list[int] = []
        self.order: list[int] = []
        self.on_execute: Callable[[], None] = _nothing
        self.in_progress_since: Callable[[], float | None] = _nothing
        self.watched_since: list[float | None] = []
        """Of each that was launched early, since when whoever watches took a step to be in progress."""

    def launch(self, plan: StepPlan, *, overtakes: bool = False) -> None:
        if overtakes:
            self.launched_early.append(plan.step)
            self.watched_since.append(self.in_progress_since())
        super().launch(plan, overtakes=overtakes)

    def wait(self, seconds: float, bell: int | None = None) -> bool:
        if bell is None or len(self.order) < 10 or self.in_the_middle is None:
            return True
        happens, self.in_the_middle = self.in_the_middle, None
        happens()
        looks = select.poll()
        looks.register(bell, select.POLLIN)
        assert looks.poll(1000 * PATIENCE_SECONDS), "a command does not ring"
        return False

    def execute(self, plan: StepPlan) -> StepResult:
        self.seconds += 1.0
        self.order.append(plan.step)
        if self.launched_early:
            self.on_execute()
        return super().execute(plan)


def _nothing() -> None:
    pass


@pytest.mark.parametrize("count", [1, 2])
async def test_requests_that_come_in_the_middle_of_a_step_are_taken_there_and_may_overtake_it(count: int) -> None:
    ranks = _RungFor()
    engine = make_engine(ranks, clock=lambda: ranks.seconds, max_num_seqs=4, async_scheduling=True)
    metrics = Metrics(version="0", num_ranks=1)
    metrics.engine_started(engine.stats(), FACTS, model="m")
    told: list[Delivery] = []
    thread = EngineThread(deliver=told.extend, metrics=metrics, clock=lambda: ranks.seconds)
    thread.take(engine)
    for number in range(2):
        thread.send(Add(stream_of(request(f"flood{number}", tokens=30, tenant="flood"))))

    def come() -> None:
        for name in others:
            thread.send(Add(stream_of(request(name, tokens=3, tenant="other"))))

    others = [f"other{number}" for number in range(count)]
    ranks.in_the_middle = come
    ranks.in_progress_since = lambda: thread.step_started_seconds
    ranks.on_execute = lambda: thread.send(Wake())  # it looks whether it may leave
    thread.run(engine, should_leave=lambda: not engine.has_work)
    first, under = ranks.launched_early[0], ranks.launched_early[0] - 1
    assert ranks.launched_early == [*range(first, first + count)], "one of them waited"
    assert ranks.order.index(under) == ranks.order.index(first) + count, "they did not overtake"
    assert None not in ranks.watched_since, "nobody would see that ranks hang while they are given what overtakes"
    tokens: dict[str, list[int]] = {}
    told_of = [("flood0", 30), ("flood1", 30), *((name, 3) for name in others)]
    for stream, event in told:
        if isinstance(event, TokensOut):
            tokens.setdefault(stream.generation.request_id, []).extend(event.token_ids)
    assert tokens == {name: [*expected_ids((5, 6, 7), count)] for name, count in told_of}
