"""A step while it is planned."""

from __future__ import annotations

from dataclasses import dataclass, field

from serve.engine.plan import Span, Start


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    budget: int
    spare: int = 0
    """Proposed tokens that may still be computed; below 0 where the debts are larger than the budget."""
    starts: list[Start] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    making: set[bytes] = field(default_factory=set)
    """Digests of the prompts' blocks that this step fills, which can be shared once it has ended."""
    num_last: int = 0
    """Running sequences that a step under way takes to their end, or out of the batch: they have left before the next plan."""
    has_preempted: bool = False
