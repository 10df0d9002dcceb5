"""What the engine says about itself, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from serve.engine.plan import StepPlan

Loss = Literal["preempted", "fair_share", "restarted"]
"""Why what was computed of a sequence counted no longer; a field of ``Recomputed``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One executed step."""

    tokens: int
    """Positions computed."""
    num_spans: int
    """Sequences that had a part in it."""
    seconds: float
    """From the start of the step to its results applied."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Positions that had been computed once and had to be again, counted as their sequences began again; those that the prefix
    cache still had are not among them."""

    preempted: int = 0
    """Their blocks were needed by others."""
    fair_share: int = 0
    """Their places were needed by tenants that had less than their share."""
    restarted: int = 0
    """The ranks were lost, their weights exchanged, or a sequence grew beyond a ``LengthRule``."""

    def plus(self, positions: int, loss: Loss) -> Recomputed:
        """With those of one more sequence."""
        return replace(self, **{loss: getattr(self, loss) + positions})


class StepTotals:
    """What all steps that computed something took."""

    def __init__(self) -> None:
        self.steps = 0
        self.overtaken = 0
        """How often one was computed anew behind another's prompt."""
        self.tokens = 0
        self.seconds = 0.0
        self.last: StepStats | None = None

    def note(self, plan: StepPlan, seconds: float) -> None:
        """Add a step that was carried out, if it computed anything."""
        if plan.spans:
            self.last = StepStats(tokens=plan.num_tokens, num_spans=len(plan.spans), seconds=seconds)
            self.steps += 1
            self.tokens += self.last.tokens
            self.seconds += seconds


@dataclass(frozen=True, slots=True)
class TenantStats:
    """A tenant of whom something runs or waits."""

    tenant: str
    sequences_running: int
    """In the running batch: the places that it has."""
    requests_queued: int
    """That wait for their first step."""


def stats_of_tenants(running: Mapping[str, int], queued: Mapping[str, int]) -> tuple[TenantStats, ...]:
    """The figures of all tenants, given theirs by name; whoever has no name is none."""
    return tuple(TenantStats(name, running.get(name, 0), queued.get(name, 0)) for name in {**running, **queued} if name)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine at one moment. Totals only ever grow."""

    num_running: int
    """Requests with at least one sequence in the running batch."""
    num_waiting: int
    """All other live requests, preempted ones included."""
    queued_requests: int
    """Requests that wait for their first step: what ``max_queued_requests`` limits."""
    queued_tokens: int
    """Prompt tokens of those."""
    queued_since_seconds: float | None
    """When the one of those that waits longest arrived; ``None`` without any."""
    kv_blocks_used: int
    """Blocks that live sequences hold."""
    kv_blocks_cached: int
    """Blocks nobody holds whose contents the prefix cache can still give back."""
    kv_blocks_total: int
    preemptions: int
    recomputed: Recomputed
    prefix_cache_queries: int
    """Tokens looked up when sequences were first scheduled."""
    prefix_cache_hits: int
    """Tokens of those that were found."""
    prompt_tokens: int
    """Prompt tokens of requests whose prompt became ready, each request counted once."""
    generation_tokens: int
    proposed_tokens: int
    """Tokens that were guessed ahead and verified."""
    accepted_tokens: int
    """Tokens of those that became output."""
    steps: int
    """Steps that computed something."""
    steps_overtaken: int
    """How often one was given up in its middle for another tenant's prompt, and computed anew."""
    tenants: tuple[TenantStats, ...] = ()
    """All of whom something runs or waits, where callers are told apart."""
    last_step: StepStats | None
