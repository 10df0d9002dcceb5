"""Steps that the ranks were given and have not answered."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from serve.engine.executor import Executor
from serve.engine.lead import Lead
from serve.engine.plan import Sampled, StepPlan, StepResult
from serve.engine.stats import StepTotals
from serve.engine.step_results import check_result
from serve.types import SequenceId

_WORTH = 0.01
"""Share of a step for which the ranks may wait for the server. A step that is planned ahead lets a new request wait for one
step more: where steps are long it would be the one who pays, for next to nothing."""
_WEIGHT = 0.125
"""How much the latest step counts in the running means."""
_MOST_SPARE_SECONDS = 1.0
"""Whoever waits looks up as often as that."""
_LATELY = 16
"""Steps of each size of which the median tells how long the next one takes."""


@dataclass(slots=True, eq=False)
class _Step:
    plan: StepPlan
    began: float
    """On the engine's clock: when it began to be planned."""
    size: int
    """How many positions it has, by powers of two: steps of one size take about as long."""
    in_time: bool = False
    """Whether the ranks had it before they answered the one before it."""


class UnderWay:
    """The steps between their launch and the end of what their results changed, in order, and the figures of those that ended.

    Seconds of steps do not overlap: one that was launched while another was under way counts from the other's end.
    """

    def __init__(self, executor: Executor, clock: Callable[[], float], *, may_run_ahead: bool) -> None:
        """Nothing is under way.

        Args:
            executor: computes the steps.
            clock: monotonic seconds.
            may_run_ahead: whether two steps may be under way.
        """
        self._executor = executor
        self._clock = clock
        self._may_run_ahead = may_run_ahead
        self._steps: deque[_Step] = deque()
        self._answered: _Step | None = None
        """The one of them that was collected and has not ended."""
        self._last_end = 0.0
        self._collected: float | None = None
        """When the ranks answered last, and had no more to do unless another step was under way; ``None`` once counted."""
        self._between = 0.0
        """Seconds from an answer to the next launch, lately."""
        self._each = 0.0
        """Seconds of a step, lately."""
        self._computing = 0.0
        """When the ranks had nothing else to do any more than the oldest step."""
        self._took: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_LATELY))
        """By a step's size: for how long the ranks computed, lately."""
        self._lead = Lead()
        self.totals = StepTotals()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def pays_ahead(self) -> bool:
        """Whether the step after the one under way should be planned now.

        It should where the ranks would wait for a good part of a step if each were planned when the one before it has ended.
        """
        return self._may_run_ahead and len(self._steps) == 1 and self._between >= _WORTH * self._each

    @property
    def only(self) -> StepPlan | None:
        """The one that is under way, where it is one."""
        return self._steps[0].plan if len(self._steps) == 1 else None

    @property
    def spare_seconds(self) -> float:
        """For how long the step after the one under way need not be planned yet: a request that comes meanwhile is in it.

        Where steps of its size took the ranks longer lately; else the step is planned at once. Where none is planned ahead,
        until the one under way should end.
        """
        if not self._may_run_ahead or len(self._steps) != 1 or not (took := self._took.get(self._steps[0].size)):
            return 0.0
        usual = statistics.median(took)
        lead = self._lead.seconds(self._between, usual) if self.pays_ahead else 0.0
        return min(_MOST_SPARE_SECONDS, max(0.0, self._computing + usual - lead - self._clock()))

    def await_planning(self, bell: int | None = None) -> bool:
        """Wait for ``spare_seconds``, or until the ranks have answered, or there is something to read from ``bell``.

        Returns:
            Whether neither of the first two is so yet.
        """
        if (seconds := self.spare_seconds) <= 0.0:
            return False
        began = self._clock()
        answered = self._executor.wait(seconds, bell)
        if self._collected is not None:  # nothing was done here meanwhile for which ranks would have to wait
            self._collected += self._clock() - began
        return not answered and self.spare_seconds > 0.0

    def launch(self, plan: StepPlan, began: float, *, overtakes: bool = False) -> None:
        """Give the ranks a step, which began to be planned at ``began``.

        Args:
            overtakes: whether it may be computed before the one that is under way.

        Raises:
            ExecutorDied: the ranks are lost.
        """
        self._executor.launch(plan, overtakes=overtakes)
        step = _Step(plan, began, sum(span.count for span in plan.spans).bit_length())
        if not self._steps:
            self._computing = self._clock()
        elif not overtakes:
            step.in_time = not self._executor.wait(0.0)
            if not step.in_time:
                self._lead.learn(was_late=True)
        self._steps.append(step)
        if self._collected is not None:
            self._between += _WEIGHT * (self._clock() - self._collected - self._between)
            self._collected = None

    def collect(self, vocab_size: int) -> tuple[StepPlan, StepResult, dict[SequenceId, list[Sampled]]]:
        """The oldest step, or one that has overtaken it, with its result and what was chosen for each sequence.

        Waits for it. It is under way until ``end``.

        Raises:
            ExecutorDied: the ranks are lost, or the result does not answer the plan.
        """
        result = self._executor.collect()
        self._collected = self._clock()
        step = next((step for step in self._steps if step.plan.step == result.step), self._steps[0])
        if step is self._steps[0]:
            self._took[step.size].append(self._collected - self._computing)
        else:  # it was begun while the oldest was computed, which says nothing of how long either takes
            self.totals.overtaken += 1
        self._computing = self._collected
        if step.in_time:  # unless the ranks needed longer to launch it than the one before it took to end
            self._lead.learn(was_late=bool(result.was_late))
        self._answered = step
        return step.plan, result, check_result(step.plan, result, vocab_size)

    def end(self, *, goes_on: bool) -> None:
        """The result of the step that was collected last was applied.

        Args:
            goes_on: whether more is to be computed; otherwise the time until the next launch is nobody's.
        """
        step, now = self._answered, self._clock()
        assert step is not None, "a step ends that was not collected"
        self._steps.remove(step)
        self._answered = None
        seconds = now - max(step.began, self._last_end)
        self.totals.note(step.plan, seconds)
        self._each += _WEIGHT * (seconds - self._each)
        self._last_end = now
        if not goes_on:
            self._collected = None

    def exchange(self, plan: StepPlan, vocab_size: int) -> StepResult:
        """Have the ranks carry out a plan with ``swap``, with nothing under way.

        Raises:
            ExecutorDied: the ranks are lost.
        """
        assert not self._steps, "weights are exchanged under a step that is under way"
        self._collected = None
        result = self._executor.execute(plan)
        check_result(plan, result, vocab_size)
        return result

    def lose(self) -> None:
        """The ranks are gone, and will answer nothing."""
        self._steps.clear()
        self._collected = self._answered = None

    def go_on_with(self, executor: Executor) -> None:
        """Others compute from now on."""
        self.lose()
        self._executor = executor
