"""When a step is planned while another is under way, and what becomes of it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

import pytest

from serve.engine.engine import Engine
from serve.engine.plan import StepPlan, StepResult
from serve.errors import DeadlineExpired, RequestAborted
from serve.types import FinishReason, RequestFailed, RequestId, SequenceFinished, SequenceId, StoppingParams
from tests.serve.engine.engines import Clock, ids_of, make_engine, make_request, run
from tests.serve.fake_executor import FakeExecutor, expected_tokens, fake_facts

MODEL = fake_facts(num_blocks=256)


class Taking(FakeExecutor):
    """Ranks that take so many seconds for a step."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__(MODEL)
        self._clock = clock
        self._seconds = seconds
        self._computed = 0.0
        """For how long somebody has waited for the step in progress."""
        self.waited: list[float] = []
        self.planning = 0.0
        """Seconds until the ranks have a plan."""
        self.launching: float | None = None
        """Seconds from then on until a device has it, where ranks launch steps ahead."""
        self._was_late: dict[int, bool] = {}
        self.most_under_way = 0

    def launch(self, plan: StepPlan, *, overtakes: bool = False) -> None:
        super().launch(plan, overtakes=overtakes)
        self._clock.now += self.planning
        self._computed += self.planning
        if self.launching is not None:
            self._was_late[plan.step] = self._computed + self.launching > self._seconds
        self.most_under_way = max(self.most_under_way, len(vars(self)["launched"]))

    def wait(self, seconds: float, bell: int | None = None) -> bool:
        if seconds:
            self.waited.append(seconds)
        self._clock.now += seconds
        self._computed += seconds
        return self._computed >= self._seconds

    def collect(self) -> StepResult:
        self._clock.now += self._seconds - self._computed
        self._computed = 0.0
        result = super().collect()
        return dataclasses.replace(result, was_late=self._was_late.get(result.step))


def go_on(engine: Engine, clock: Clock, steps: int, between: float) -> None:
    """The server takes so many seconds between a step's answer and the next one."""
    for _ in range(steps):
        engine.step()
        clock.now += between


@pytest.mark.parametrize(("seconds", "between", "ahead"), [(0.01, 0.001, 2), (10.0, 0.001, 1), (0.01, 0.0, 1), (10.0, 1.0, 2)])
def test_steps_are_planned_ahead_where_the_ranks_would_wait_for_a_good_part_of_one(
    seconds: float, between: float, ahead: int
) -> None:
    """Elsewhere a new request would wait for one long step more, and nobody would gain by it."""
    clock = Clock()
    executor = Taking(clock, seconds)
    engine = make_engine(MODEL, executor=executor, clock=clock, async_scheduling=True)
    engine.add(make_request(max_new=200))
    go_on(engine, clock, 30, between)
    executor.most_under_way = 0
    go_on(engine, clock, 30, between)
    assert executor.most_under_way == ahead
    assert engine.stats().last_step is not None


def late(engine: Engine, clock: Clock, steps: int, between: float) -> list[int]:
    """The same by the engine's thread, which takes requests when it is late enough; returns the steps under way then."""
    under_way = []
    for _ in range(steps):
        engine.await_planning()
        under_way.append(len(engine._under_way))
        engine.step()
        clock.now += between
    return under_way


def running() -> tuple[Engine, Taking, Clock]:
    """An engine that knows how long its steps take: 0.1 s, with 2 ms between them."""
    clock = Clock()
    executor = Taking(clock, 0.1)
    engine = make_engine(MODEL, executor=executor, clock=clock, async_scheduling=True)
    engine.add(make_request("runs", max_new=1000))
    late(engine, clock, 20, 0.002)
    executor.waited.clear()
    return engine, executor, clock


def test_a_step_is_planned_ahead_no_sooner_than_its_ranks_may_need_it() -> None:
    """What comes while the ranks compute a step is part of the next one."""
    engine, executor, clock = running()
    began = clock.now
    assert late(engine, clock, 10, 0.002) == [1] * 10
    assert clock.now - began == pytest.approx(10 * 0.1, rel=0.03), "the ranks waited for nobody"
    assert len(executor.waited) == 10
    assert all(0.06 < seconds < 0.09 for seconds in executor.waited), "most of a step, and some time before its end"

    engine.await_planning()
    engine.add(make_request("comes", prompt=(4, 5), max_new=5))
    events = [*engine.step(), *engine.step()]
    assert ids_of(events, "comes") == expected_tokens((4, 5), 1), "it waited for the step under way and for no other"


def test_the_longer_plans_come_in_time_the_later_they_are_made() -> None:
    """Until one comes when the ranks have ended already: from then on somewhat sooner again."""
    engine, executor, clock = running()
    late(engine, clock, 200, 0.002)
    first, *_, last = executor.waited
    assert 0.06 < first < 0.09 < last < 0.1
    executor.waited.clear()
    executor.planning = 0.05
    late(engine, clock, 3, 0.002)
    assert executor.waited[0] > executor.waited[2], "its plans take the ranks half a step to get"
    late(engine, clock, 200, 0.002)
    assert executor.waited[-1] < 0.09, "as soon as ever, since all are late"


def test_a_plan_comes_as_much_sooner_as_the_ranks_need_to_launch_it() -> None:
    """They say whether the device had nothing left to do by then."""
    leads = []
    for launching in (None, 0.0, 0.004):
        engine, executor, clock = running()
        executor.launching = launching
        late(engine, clock, 500, 0.002)
        leads.append(0.1 - statistics.median(executor.waited[-200:]) - 0.002)
        told = list(executor._was_late.values())[-200:]
        assert sum(told) <= 40, "one of ten, or somewhat more: it is learnt one step later"
    assert leads[0] == pytest.approx(leads[1], abs=0.0005)
    assert 0.004 < leads[2] - min(leads[:2]) < 0.0055


def test_a_step_is_not_waited_for_where_none_of_its_size_was_seen() -> None:
    clock = Clock()
    executor = Taking(clock, 0.1)
    engine = make_engine(MODEL, executor=executor, clock=clock, async_scheduling=True, max_step_tokens=64)
    engine.add(make_request("runs", max_new=200))
    late(engine, clock, 20, 0.002)
    engine.add(make_request("long", prompt=tuple(range(1, 129)), max_new=2))
    late(engine, clock, 1, 0.002)  # its first chunk is under way now
    executor.waited.clear()
    engine.await_planning()
    assert executor.waited == []


def test_time_in_which_nothing_was_asked_for_is_not_time_that_ranks_waited() -> None:
    clock = Clock()
    executor = Taking(clock, 1.0)
    engine = make_engine(MODEL, executor=executor, clock=clock, async_scheduling=True)
    for number in range(5):
        engine.add(make_request(str(number), max_new=10))
        while engine.has_work:
            go_on(engine, clock, 1, 0.0001)
        clock.now += 3600.0
    executor.most_under_way = 0
    engine.add(make_request("last", max_new=10))
    run(engine)
    assert executor.most_under_way == 1


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda engine, _: engine.abort(RequestId("ends"), RequestAborted("it is not wanted")), RequestAborted),
        (lambda engine, clock: setattr(clock, "now", clock.now + 50.0), DeadlineExpired),
    ],
)
def test_who_is_given_up_with_a_step_under_way_is_told_so_once_and_the_others_go_on(
    end: Callable[[Engine, Clock], object], reason: type[Exception]
) -> None:
    clock = Clock()
    executor = FakeExecutor(MODEL)
    engine = make_engine(MODEL, executor=executor, clock=clock, async_scheduling=True)
    engine.add(make_request("goes on", max_new=20))
    engine.add(make_request("ends", max_new=20, deadline_seconds=clock.now + 10.0))
    events = [*engine.step(), *engine.step()]
    assert len(vars(executor)["launched"]) == 1
    end(engine, clock)
    events += engine.step()
    told = ids_of(events, "ends")
    engine.check()
    engine.add(make_request("ends", prompt=(9, 9), max_new=3))
    events += run(engine)
    failed = [event for event in events if isinstance(event, RequestFailed)]
    assert [(event.request_id, type(event.error)) for event in failed] == [("ends", reason)]
    assert ids_of(events, "goes on") == expected_tokens((1, 2, 3), 20)
    assert ids_of(events, "ends") == [*told, *expected_tokens((9, 9), 3)]


def test_an_end_costs_one_row_and_is_not_told_twice() -> None:
    tokens = expected_tokens((1, 2, 3), 20)
    computed = []
    for ahead in (False, True):
        executor = FakeExecutor(MODEL)
        engine = make_engine(MODEL, executor=executor, async_scheduling=ahead)
        engine.add(make_request("goes on", prompt=(7, 7), max_new=20))
        engine.add(make_request("ends", stopping=StoppingParams(max_new_tokens=20, stop_ids=(tokens[5],))))
        events = run(engine)
        (finish,) = [e for e in events if isinstance(e, SequenceFinished) and e.request_id == "ends"]
        assert (finish.reason, finish.usage.completion_tokens) == (FinishReason.STOP_ID, 6)
        assert ids_of(events, "goes on") == expected_tokens((7, 7), 20)
        computed.append(executor.num_tokens)
    assert computed[1] == computed[0] + 1


def test_sequences_that_guess_have_every_token_in_hand_and_run_ahead_while_they_rest_or_once_they_have_ended() -> None:
    facts = fake_facts(vocab_size=2, num_blocks=256)
    executor = Taking(Clock(), 0.0)
    executor.facts = facts
    engine = make_engine(facts, executor=executor, async_scheduling=True, speculative_tokens=4)
    engine.add(make_request("guesses", prompt=(1, 0) * 8, max_new=100))
    engine.add(make_request("does not", prompt=(0, 1, 1), max_new=300, speculative_tokens=0))
    events = []
    while RequestId("guesses") in engine.request_ids:
        events += engine.step()
        for plan in vars(executor)["launched"]:
            assert not any(span.proposed for span in plan.spans)
    assert any(span.continues for plan in executor.given for span in plan.spans if span.sequence == SequenceId(0)), "it rested"
    assert engine.stats().accepted_tokens > 10
    events += run(engine)
    assert executor.most_under_way == 2
    assert ids_of(events, "guesses") == expected_tokens((1, 0) * 8, 100, vocab_size=2)
    assert ids_of(events, "does not") == expected_tokens((0, 1, 1), 300, vocab_size=2)
