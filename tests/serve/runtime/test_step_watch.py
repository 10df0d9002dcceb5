"""How long a step may take, by those before it."""

from __future__ import annotations

from collections.abc import Iterator

from serve.config import SupervisorConfig
from serve.engine.plan import Span, Start, StepPlan, StepResult
from serve.runtime.step_watch import StepWatch
from serve.types import SamplingParams, SequenceId
from tests.serve.fake_executor import Deferred


class Slow(Deferred):
    """An executor that takes as long as it is told, and asks what is said of the step meanwhile."""

    def __init__(self) -> None:
        self.now = 0.0
        self.watch = StepWatch(self, SupervisorConfig(step_timeout_seconds=120.0, step_margin_seconds=15.0), lambda: self.now)
        self.takes_seconds = 0.0
        self.limit_seconds = 0.0
        self.description = ""

    def execute(self, plan: StepPlan) -> StepResult:
        self.limit_seconds, self.description = self.watch.limit_seconds(), self.watch.describe()
        self.now += self.takes_seconds
        return StepResult(step=plan.step)


def test_the_first_step_has_a_limit_of_its_own_and_the_next_is_held_to_it() -> None:
    slow = Slow()
    first: list[float] = []
    slow.takes_seconds = 4.0
    for step in range(2):
        slow.watch.execute(StepPlan(step=step, spans=(Span(sequence=SequenceId(0), start=0, count=8, sample=True),)))
        first.append(slow.limit_seconds)
    assert first == [120.0, 19.0]
    assert slow.description == "step 1, 8 positions of 1 sequences, took longer than 19 s (4.0 s was the longest so far)"


class Limits(Slow):
    """Limits of steps of one sequence that take a second each."""

    def __init__(self) -> None:
        super().__init__()
        self.takes_seconds = 1.0

    def of(self, count: int, start: int, *, scored: bool = False) -> float:
        sequence = SequenceId(int(scored))
        new = Start(
            sequence=sequence, index=0, token_ids=(1,), num_prompt_tokens=1, sampling=SamplingParams(),
            prompt_logprobs=0 if scored else None,
        )  # fmt: skip
        self.watch.execute(StepPlan(step=0, starts=(new,), spans=(Span(sequence=sequence, start=start, count=count),)))
        said = self.limit_seconds
        self.watch.execute(StepPlan(step=1, dropped=(sequence,)))
        return said


def test_a_step_more_than_twice_as_large_as_any_before_it_has_the_first_ones_patience() -> None:
    limits = Limits()
    assert limits.of(64, 0) == 120.0
    assert limits.of(64, 0) == limits.of(1, 1000) == 16.0, "less work in all"
    assert limits.of(129, 0) == 120.0, "more positions"
    assert limits.of(64, 1000) == 120.0, "a longer context"
    assert limits.of(32, 0, scored=True) == 120.0, "the first logits of every position"
    assert limits.of(65, 0, scored=True) == 120.0, "more than twice as many"
    assert limits.of(32, 0, scored=True) == limits.of(64, 1000) == 16.0


def test_a_step_a_little_larger_than_any_before_it_may_take_longer_in_proportion() -> None:
    limits = Limits()
    limits.of(64, 0, scored=True)
    assert limits.of(80, 0) == 1.0 * (80 * 80) / (64 * 64) + 15.0, "the pairs of positions grow most"
    assert limits.of(1, 7_999) == 1.0 * 8_000 / 6_400 + 15.0
    assert limits.of(80, 0, scored=True) == 1.0 * 80 / 64 + 15.0, "the rows of logits do"


def test_hardly_any_step_of_a_sequence_that_grows_is_without_a_measure() -> None:
    slow = Slow()
    slow.takes_seconds = 0.01
    limits: list[float] = []
    for step, (start, count) in enumerate([(0, 8), *((8 + place, 1) for place in range(500))]):
        slow.watch.execute(StepPlan(step=step, spans=(Span(sequence=SequenceId(0), start=start, count=count, sample=True),)))
        limits.append(slow.limit_seconds)
    assert limits.count(120.0) == 1
    assert max(limits[1:]) < 15.1


def test_a_machine_slower_than_the_first_limit_is_believed() -> None:
    slow = Slow()
    slow.takes_seconds = 300.0
    for count in (8, 8, 17):
        slow.watch.execute(StepPlan(step=0, spans=(Span(sequence=SequenceId(0), start=0, count=count),)))
    assert slow.limit_seconds == 315.0


def test_a_prompt_that_overtakes_a_step_has_the_patience_that_it_would_have_by_itself() -> None:
    slow = Slow()
    slow.takes_seconds = 1.0
    limits: list[float] = []

    def spans(sequence: int, start: int, count: int) -> tuple[Span, ...]:
        return (Span(sequence=SequenceId(sequence), start=start, count=count, sample=True),)

    slow.watch.execute(StepPlan(step=0, spans=spans(0, 0, 8)))
    slow.watch.launch(StepPlan(step=1, spans=spans(0, 8, 1)))
    slow.watch.launch(StepPlan(step=2, spans=spans(1, 0, 400)), overtakes=True)
    for _ in range(2):
        slow.watch.collect()
        limits.append(slow.limit_seconds)
    assert limits == [120.0, 16.0]


class Counted(tuple[Span, ...]):
    """Spans that count how often they are gone through."""

    times = 0

    def __iter__(self) -> Iterator[Span]:
        Counted.times += 1
        return super().__iter__()


def test_the_spans_of_a_step_are_gone_through_once_to_know_its_size() -> None:
    Slow().watch.execute(StepPlan(step=0, spans=Counted(Span(sequence=SequenceId(n), start=0, count=1) for n in range(3))))
    assert Counted.times == 1
