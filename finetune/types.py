"""Values that the layers of training share: frozen, printable."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one optimizer step did, the same on every rank."""

    loss: float
    """Mean over all target tokens of the step, in nats."""
    grad_norm: float
    """Norm of the whole gradient before clipping; NaN when the step was skipped."""
    num_targets: int
    skipped: str | None
    """``loss`` or ``gradient``: what was not finite; ``scale``: a gradient in fp16, answered with a smaller loss scale. The
    weights are untouched then."""
    stop: bool
    """Whether any rank asked to stop."""
    diagnosis: str | None = None
    """Of a skipped step, if it was looked for: the first value that was not finite."""


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
