"""Steps that the ranks were given and have not answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from serve.engine.executor import Executor
from serve.engine.plan import StepPlan, StepResult
from serve.engine.stats import StepTotals
from serve.engine.step_results import check_result


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    began: float
    """On the engine's clock: when it began to be planned."""


class UnderWay:
    """The steps between their launch and the end of what their results changed, in order, and the figures of those that ended.

    Seconds of steps do not overlap: one that was launched while another was under way counts from the other's end.
    """

    def __init__(self, executor: Executor, clock: Callable[[], float]) -> None:
        """Nothing is under way.

        Args:
            executor: computes the steps.
            clock: monotonic seconds.
        """
        self._executor = executor
        self._clock = clock
        self._steps: deque[_Step] = deque()
        self._last_end = 0.0
        self.totals = StepTotals()

    def __len__(self) -> int:
        return len(self._steps)

    def launch(self, plan: StepPlan, began: float) -> None:
        """Give the ranks a step, which began to be planned at ``began``.

        Raises:
            ExecutorDied: the ranks are lost.
        """
        self._executor.launch(plan)
        self._steps.append(_Step(plan, began))

    def collect(self, vocab_size: int) -> tuple[StepPlan, StepResult]:
        """The oldest step with its result; waits for it. It is under way until ``end``.

        Raises:
            ExecutorDied: the ranks are lost, or the result does not answer the plan.
        """
        plan = self._steps[0].plan
        result = self._executor.collect()
        check_result(plan, result, vocab_size)
        return plan, result

    def end(self) -> None:
        """The result of the oldest step was applied."""
        step, now = self._steps.popleft(), self._clock()
        self.totals.note(step.plan, now - max(step.began, self._last_end))
        self._last_end = now

    def exchange(self, plan: StepPlan, vocab_size: int) -> StepResult:
        """Have the ranks carry out a plan with ``swap``, with nothing under way.

        Raises:
            ExecutorDied: the ranks are lost.
        """
        assert not self._steps, "weights are exchanged under a step that is under way"
        result = self._executor.execute(plan)
        check_result(plan, result, vocab_size)
        return result

    def lose(self) -> None:
        """The ranks are gone, and will answer nothing."""
        self._steps.clear()

    def go_on_with(self, executor: Executor) -> None:
        """Others compute from now on."""
        self.lose()
        self._executor = executor
