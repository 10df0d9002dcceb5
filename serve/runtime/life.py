"""One life of the engine, from the start of its ranks to their end."""

from __future__ import annotations

from dataclasses import dataclass

from serve.engine.executor import ModelFacts
from serve.errors import EngineDown
from serve.runtime.edition import Edition
from serve.runtime.seams import RankGroup
from serve.runtime.step_watch import StepWatch

END_SECONDS = 90.0
"""A life that must end and takes longer never will: its thread hangs, and only a new process helps."""


@dataclass(slots=True)
class Life:
    """One group of ranks and what was found out about it."""

    edition: Edition
    group: RankGroup
    started_seconds: float
    steps: StepWatch
    facts: ModelFacts | None = None
    """What its ranks said, with what they serve by now."""
    serving: bool = False
    replaced: bool = False
    """It ends because another edition is to be served."""
    broke: bool = False
    """The engine itself failed: nothing that it holds is to be trusted."""
    cause: str | None = None
    """Why it must end; set once, by whoever finds out first."""
    condemned_seconds: float | None = None
    """When that was, until nothing is left of it."""

    def never_ends(self, now_seconds: float) -> bool:
        """Whether it had to end long ago, and something of it is left still."""
        condemned = self.condemned_seconds
        return condemned is not None and now_seconds - condemned > END_SECONDS


def engine_down() -> EngineDown:
    """What those in flight are told when a life has ended and another will come."""
    return EngineDown("a rank died or froze; the engine is being restarted, try again in a moment")


def engine_lost() -> EngineDown:
    """What they are told when none will."""
    return EngineDown("the engine could not be brought back")
