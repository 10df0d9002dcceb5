"""What a step holds between its forward and its backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from finetune.config.checks import require


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationConfig:
    """Activations and logits, the part of memory that grows with the batch."""

    checkpoint: Literal["none", "device", "cpu"] = "none"
    """Keep each block's input alone and compute the rest again in the backward pass: about a third more time, far less
    memory. ``cpu``: those inputs wait in the host's memory."""

    loss_rows: int | None = None
    """Target tokens whose logits exist at once; unset: chosen, about 32 MiB of logits (256 on a GPU). 0 holds them whole."""

    def __post_init__(self) -> None:
        require(self.loss_rows is None or self.loss_rows >= 0, "activations.loss_rows", self.loss_rows, "be 0 or more")
