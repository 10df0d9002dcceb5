"""How long the step in progress may take, by the steps before it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from serve.config import SupervisorConfig
from serve.engine.executor import Executor
from serve.engine.plan import StepPlan, StepResult
from serve.types import SequenceId

_MOST_TIMES = 2.0
"""A step larger than this times all before it is not told by them."""


@dataclass(frozen=True, slots=True)
class _Size:
    """What decides how long a step takes, each part by itself."""

    tokens: int = 0
    """Positions computed."""
    pairs: int = 0
    """Pairs of a computed position and one that it sees."""
    rows: int = 0
    """Rows of logits."""

    def __or__(self, other: _Size) -> _Size:
        return _Size(max(self.tokens, other.tokens), max(self.pairs, other.pairs), max(self.rows, other.rows))

    def times(self, other: _Size) -> float:
        """How many times as large as the other it is in the part where that is most; infinity where the other has none."""
        parts = ((self.tokens, other.tokens), (self.pairs, other.pairs), (self.rows, other.rows))
        return max(mine / theirs if theirs else math.inf for mine, theirs in parts if mine or theirs)


class StepWatch:
    """The executor of one life of the engine, with an eye on how long its steps take.

    A step may take ``step_margin_seconds`` longer than the longest before it; one that is larger than all before it in any
    respect, that much longer in proportion, as the steps of a sequence that grows are. Of the first, and of one more than
    twice as large as any before it, nothing says yet what is long: it may take ``step_timeout_seconds``, if that is more.

    A step that was launched while another was under way is in progress once that one is collected. One that may overtake it
    may be computed first: until one of them is collected, what is in progress is as large as the larger in each respect.

    ``launch``, ``wait``, ``collect`` and ``execute`` belong to the engine's thread; everything else may be called from another.
    """

    def __init__(self, executor: Executor, config: SupervisorConfig, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._config = config
        self._clock = clock
        self._scored: set[SequenceId] = set()
        """Live sequences of whose prompt every position's logits are computed."""
        self._under_way: deque[tuple[StepPlan, _Size]] = deque()
        self._step: tuple[StepPlan, _Size] | None = None
        """The oldest of them, which is in progress, and how large it is, or what may be computed before it."""
        self._began = 0.0
        self._largest = _Size()
        self._longest_seconds = 0.0
        self._excused_seconds = 0.0
        self._exchanging = False

    def launch(self, plan: StepPlan, *, overtakes: bool = False) -> None:
        """Give the ranks one plan, to be computed once all before it are, and note how large it is; does not wait.

        Args:
            overtakes: whether it may be computed before the one that is under way.

        Raises:
            ExecutorDied: the ranks are lost, and with them all that was under way; no further call can succeed.
        """
        self._under_way.append((plan, size := self._size_of(plan)))
        if self._step is None:
            self._begin_next()
        elif overtakes:
            self._step = self._step[0], self._step[1] | size
        self._executor.launch(plan, overtakes=overtakes)

    def wait(self, seconds: float, bell: int | None = None) -> bool:
        """Wait until the result that ``collect`` would give is there, or the ranks are lost; at most so many seconds.

        Args:
            bell: a descriptor that ends the wait as well when there is something to read from it.

        Returns:
            Whether ``collect`` would answer at once.
        """
        return self._executor.wait(seconds, bell)

    def collect(self) -> StepResult:
        """Wait for the result of the step in progress, and remember how long it took; then the next one is in progress.

        One that has overtaken it counts from when that began, which then begins anew.

        Raises:
            ExecutorDied: the ranks are lost, and with them all that was under way; no further call can succeed.
        """
        result = self._executor.collect()
        place = next((place for place, (plan, _) in enumerate(self._under_way) if plan.step == result.step), 0)
        _, size = self._under_way[place]
        del self._under_way[place]
        self._longest_seconds = max(self._longest_seconds, self._clock() - self._began - self._excused_seconds)
        self._excused_seconds = 0.0
        self._largest |= size
        self._begin_next()
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        """Have one step computed while nothing is under way; one that exchanges weights may take as long as a start.

        Raises:
            ExecutorDied: the ranks are lost, and with them all that was under way; no further call can succeed.
        """
        if plan.swap is not None:
            return self._exchange(plan)
        self.launch(plan)
        return self.collect()

    def _begin_next(self) -> None:
        self._step = self._under_way[0] if self._under_way else None
        self._began = self._clock()

    def _exchange(self, plan: StepPlan) -> StepResult:
        """Weights may have to be read first: that takes what a start takes, and says nothing about how long steps do."""
        self._scored.clear()
        self._exchanging = True
        try:
            return self._executor.execute(plan)
        finally:
            self._exchanging = False
            self._excused_seconds = 0.0

    def excuse(self, seconds: float) -> None:
        """Do not count so many seconds of the step in progress, if any, as its own: the whole process stood still meanwhile."""
        if self._step is not None or self._exchanging:
            self._excused_seconds += seconds

    def limit_seconds(self) -> float:
        """How long the step in progress may take, from its schedule to its answers."""
        if self._exchanging:
            return self._config.start_timeout_seconds + self._excused_seconds
        step, margin = self._step, self._config.step_margin_seconds
        times = math.inf if step is None or not self._largest.tokens else step[1].times(self._largest)
        if times <= _MOST_TIMES:
            return self._longest_seconds * max(1.0, times) + margin + self._excused_seconds
        return max(self._longest_seconds + margin, self._config.step_timeout_seconds) + self._excused_seconds

    def describe(self) -> str:
        """The step in progress, which takes too long, in words."""
        step = self._step
        limit = f"longer than {round(self.limit_seconds(), 1):g} s ({self._longest_seconds:.1f} s was the longest so far)"
        if step is None:
            return f"a step took {limit}, outside of the ranks"
        plan, size = step
        return f"step {plan.step}, {size.tokens} positions of {len(plan.spans)} sequences, took {limit}"

    def cause(self, rank: str | None) -> str:
        """Why a life ends whose step takes too long: the rank that the others wait for, if that can be told, and the step."""
        return f"the ranks hang: {self.describe()}" if rank is None else f"{rank} hangs: {self.describe()}"

    def _size_of(self, plan: StepPlan) -> _Size:
        self._scored.difference_update(plan.dropped)
        self._scored.update(start.sequence for start in plan.starts if start.prompt_logprobs is not None)
        scored, tokens, pairs, rows = self._scored, 0, 0, 0
        for span in plan.spans:  # one plain loop: the ranks wait meanwhile
            count = span.count
            tokens += count
            pairs += count * (span.start + count)
            rows += count if scored and span.sequence in scored else span.sample
        return _Size(tokens, pairs, rows)
