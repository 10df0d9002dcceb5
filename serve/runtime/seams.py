"""What stands around the supervisor: the ranks that it starts, and who hears of their life."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from serve.config import ServerConfig
from serve.engine.executor import ModelFacts, Prepared, Profiled, Unlike
from serve.engine.plan import StepPlan, StepResult
from serve.errors import EngineDown, StartError
from serve.runtime.edition import Edition


class Profiling(Protocol):
    """What ranks record of their steps, one recording at a time. Every method blocks; any thread.

    Raises, each of them:
        RankStartError: a rank could not do it.
        ExecutorDied: the ranks are lost, or do not answer.
    """

    def begin(self, ranks: Sequence[int], steps: int, at_most_seconds: float) -> None:
        """Have ranks record their next steps, for so long at most. Answers before a step was computed."""
        ...

    def told(self, ranks: Sequence[int]) -> tuple[Profiled, ...]:
        """How far each of them is."""
        ...

    def part(self, rank: int, offset: int) -> bytes:
        """What a rank's trace has from there on, as much as is sent at once; nothing behind its end."""
        ...

    def forget(self, ranks: Sequence[int]) -> None:
        """Have them give their traces back, and record no more."""
        ...


class RankGroup(Protocol):
    """All ranks of one model, from their birth to their death. Started once, closed once, never used again."""

    def start(self) -> ModelFacts:
        """Spawn the ranks and load the model. Blocks.

        The thread that calls this outlives the ranks: Linux ties a child's parent-death signal to the thread that made it.

        Raises:
            ConfigError: the model or an option is at fault.
            RankStartError: a rank failed, or ``close`` was called meanwhile.
        """
        ...

    def launch(self, plan: StepPlan, *, overtakes: bool = False) -> None:
        """Give the ranks one plan, to be computed once all before it are; does not wait for that.

        Args:
            overtakes: whether it may be computed before the one that is under way.

        Raises:
            ExecutorDied: the ranks are lost, and with them all that was under way; no further call can succeed.
        """
        ...

    def wait(self, seconds: float, bell: int | None = None) -> bool:
        """Wait until the result that ``collect`` would give is there, or the ranks are lost; at most so many seconds.

        Args:
            bell: a descriptor that ends the wait as well when there is something to read from it.

        Returns:
            Whether ``collect`` would answer at once.
        """
        ...

    def collect(self) -> StepResult:
        """Wait for the result of the oldest plan that was launched and not collected, or of one that has overtaken it.

        Raises:
            ExecutorDied: the ranks are lost, and with them all that was under way; no further call can succeed.
        """
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch one plan while nothing is under way, and wait for its result.

        Raises:
            ExecutorDied: the ranks are lost, and with them all that was under way; no further call can succeed.
        """
        ...

    def prepare(self, config: ServerConfig, number: int) -> Prepared | Unlike:
        """Make the weights of a checkpoint ready for a plan with ``swap``, while steps go on. Blocks; any thread.

        Raises:
            ConfigError: the checkpoint is at fault.
            RankStartError: a rank could not do it.
            ExecutorDied: the ranks are lost, or do not answer.
        """
        ...

    def forget_prepared(self) -> None:
        """Give back the memory of what was prepared and not taken, or of what was served before. Blocks; any thread."""
        ...

    def profiling(self) -> Profiling:
        """What the ranks record of their steps. Any thread.

        Raises:
            ExecutorDied: ``close`` was called.
        """
        ...

    def heartbeat_ages(self) -> tuple[float, ...]:
        """Seconds since each rank was last heard of. Any thread."""
        ...

    def memory(self) -> tuple[tuple[int, int], ...]:
        """Bytes of each rank: resident, and of its device. Any thread."""
        ...

    def dead_rank(self) -> str | None:
        """A sentence, a ``Loss``, if a rank's process is gone or silent for too long, or hangs while it loads. Cheap; any
        thread."""
        ...

    def hanging_rank(self) -> int | None:
        """The rank that the others wait for in a step; ``None`` where that cannot be told. Any thread."""
        ...

    def dump_stacks(self) -> None:
        """Have every rank that can print the stacks of its threads on standard error. Any thread."""
        ...

    def close(self) -> None:
        """Kill what lives, reap it, free everything. Idempotent; any thread; a blocked ``collect`` raises ``ExecutorDied``."""
        ...


class LifeListener(Protocol):
    """Hears of the engine's life. Called on the supervisor's threads; must not block."""

    def engine_up(self, edition: Edition, facts: ModelFacts) -> None: ...

    def engine_down(self, error: EngineDown) -> None: ...

    def weights_taken(self, edition: Edition, facts: ModelFacts) -> None:
        """The ranks that served an edition serve this one now, which has other weights and is the same in all else."""
        ...

    def taken_back(self, error: StartError) -> None:
        """The edition of the last ``reload`` cannot be loaded; the one before it is being started again."""
        ...

    def gave_up(self, error: StartError) -> None:
        """The server cannot go on."""
        ...
