"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """How far a run has come: all of its position but the tensors."""

    step: int
    """Steps of the schedule done, skipped ones included."""
    samples: int
    """Samples taken, all ranks together: the position in the data."""
    tokens: int
    """Target tokens taken."""
    adam_steps: int
    """Updates the optimizer made."""
    skipped_in_a_row: int
    """Without those that a smaller loss scale answered."""
    loss_scale: tuple[float, int] | None = None
    """In fp16: the scale, and the steps since it changed."""
