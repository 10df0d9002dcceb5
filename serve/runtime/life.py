"""One life of the engine, from the start of its ranks to their end."""

from __future__ import annotations

from dataclasses import dataclass

from serve.engine.executor import ModelFacts
from serve.runtime.edition import Edition
from serve.runtime.seams import RankGroup
from serve.runtime.step_watch import StepWatch


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
