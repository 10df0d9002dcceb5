"""How long a step may take, by those before it."""

from __future__ import annotations

from serve.config import SupervisorConfig
from serve.engine.plan import Span, Start, StepPlan, StepResult
from serve.runtime.step_watch import StepWatch
from serve.types import SamplingParams, SequenceId


class Slow:
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


def test_a_step_larger_than_any_before_it_has_the_first_ones_patience() -> None:
    slow = Slow()
    slow.takes_seconds = 1.0

    def limit(count: int, start: int, *, scored: bool = False) -> float:
        sequence = SequenceId(int(scored))
        new = Start(
            sequence=sequence, index=0, token_ids=(1,), num_prompt_tokens=1, sampling=SamplingParams(),
            prompt_logprobs=0 if scored else None,
        )  # fmt: skip
        slow.watch.execute(StepPlan(step=0, starts=(new,), spans=(Span(sequence=sequence, start=start, count=count),)))
        said = slow.limit_seconds
        slow.watch.execute(StepPlan(step=1, dropped=(sequence,)))
        return said

    assert limit(64, 0) == 120.0
    assert limit(64, 0) == limit(1, 1000) == 16.0, "less work in all"
    assert limit(65, 0) == 120.0, "more positions"
    assert limit(64, 1000) == 120.0, "a longer context"
    assert limit(32, 0, scored=True) == 120.0, "logits of every position"
    assert limit(32, 0, scored=True) == limit(64, 1000) == 16.0


def test_a_machine_slower_than_the_first_limit_is_believed() -> None:
    slow = Slow()
    slow.takes_seconds = 300.0
    for count in (8, 8, 9):
        slow.watch.execute(StepPlan(step=0, spans=(Span(sequence=SequenceId(0), start=0, count=count),)))
    assert slow.limit_seconds == 315.0
