"""An exchange of the weights between two steps: what is asked for, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weights:
    """What the model computes with from one exchange to the next."""

    number: int
    """Under which the ranks have prepared them; 0 for those they began with."""
    checkpoint_step: int | None
    """Training step of their checkpoint, where it is recorded."""


@dataclass(frozen=True, slots=True)
class Swap:
    """Take these weights, which the ranks hold ready, once no request is alive that began and asked to end on the same."""

    weights: Weights
    patience_seconds: float
    """On the engine's clock: what such requests have not ended by then ends with an error."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """How an exchange ended."""

    swap: Swap
    refused: str
    """Why the weights before it stay; empty where they do not."""
    seconds: float
    """For how long no step could be computed because of it."""
    num_recomputed: int
    """Sequences that ran and are computed again."""
