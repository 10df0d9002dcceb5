"""What a run asks of its engine, whichever it is: ``zero.engine.ZeroEngine`` or ``pipeline.engine.PipelineEngine``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from finetune.data.batches import Microbatch
from finetune.engines.loss_scale import LossScale

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from finetune.model.build import Gather


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
    """The first value that was not finite, of a skipped step where it was looked for."""


class TrainingEngine(Protocol):
    """One model in training on this rank. Every method is collective: all ranks call it, in the same order."""

    rank: int
    world_size: int
    data_rank: int
    """Which share of each step's samples this rank computes."""
    data_ranks: int
    device: torch.device
    loss_scale: LossScale | None
    """In fp16."""

    @property
    def model(self) -> nn.Module:
        """All parameters by name and shape; their values may be elsewhere."""

    def train_step(
        self, batches: Sequence[Microbatch], rate: float, *, stop: bool = False, diagnose: bool = False
    ) -> StepOutcome:
        """One optimizer step, normalised by the target tokens of all ranks together.

        Args:
            stop: whether this rank would stop; all learn of it.
            diagnose: find out where a value that is not finite came from, should there be one. Takes another forward pass.
        """

    def evaluate(self, batches: Sequence[Microbatch]) -> tuple[float, int]:
        """Sum of the losses and number of targets over all ranks."""

    def agree(self, good: bool) -> bool:
        """Whether ``good`` is true on every rank."""

    def weights(self, dtype: torch.dtype, *, from_master: bool = False) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every parameter once, whole, on CPU, on rank 0 alone."""

    def master_weights(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """What a resumed run needs besides moments, by the model's own names, fp32, on rank 0 alone."""

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """The optimizer's moments of every trained parameter, whole, on rank 0 alone."""

    def set_master_weights(self, read: Callable[[str], torch.Tensor]) -> None:
        """Replace the fp32 weights that the optimizer updates; those that compute must have been filled with the same numbers.

        Args:
            read: called with a parameter's own name; gives that parameter whole, fp32, on the CPU.
        """

    def set_optimizer_state(self, read: Callable[[str], torch.Tensor], optimizer_steps: int) -> None:
        """Replace the optimizer's moments, and the number of updates it has made.

        Args:
            read: called with a name of ``optimizer_state`` (``exp_avg.<parameter>``); gives it whole, fp32, on the CPU.
            optimizer_steps: updates made when the moments were saved; what corrects their bias counts on from it.
        """

    @property
    def optimizer_steps(self) -> int:
        """Updates the optimizer has made since the run began, steps that were skipped not counted."""

    def rng_states(self) -> list[torch.Tensor]:
        """The random state of every rank, by rank."""

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Replace the state of the generator of this rank's device: uint8, as ``rng_states`` gave it for the rank."""

    def describe(self) -> list[str]:
        """What the engine has to say about itself before training, line by line."""

    def close(self) -> None:
        """Leave the process group; nothing can be asked of the engine afterwards."""


Fill = Callable[["PreTrainedModel", "Gather"], None]
"""Gives an empty model its first weights; the second argument makes parameters whole for a moment."""
FillAdapters = Callable[[nn.Module, "Gather"], None]
"""Gives the adapters of peft's model their first weights; the second argument makes parameters whole for a moment."""
