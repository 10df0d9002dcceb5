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

    packed_attention: Literal["auto", "mask", "varlen"] = "auto"
    """How attention keeps the samples of a row apart (``data.packing: isolate``). ``mask``: a square for each row and layer.
    ``varlen``: by their lengths, with torch's kernel for that: on GPUs, in 16 bits. ``auto``: ``varlen`` where it can be."""

    loss: Literal["rows", "fused"] = "rows"
    """``rows``: logits are made some rows at a time, see ``loss_rows``. ``fused``: by liger-kernel's loss, on GPUs, where it is
    installed."""

    loss_rows: int | None = None
    """Target tokens whose logits exist at once; unset: a sixteenth of them, but 16 to 32 MiB of
    logits (128 to 256 on a GPU). 0 holds them whole."""

    def __post_init__(self) -> None:
        require(self.loss_rows is None or self.loss_rows >= 0, "activations.loss_rows", self.loss_rows, "be 0 or more")
        rule = "be unset with activations.loss fused, which chooses its own"
        require(self.loss_rows is None or self.loss == "rows", "activations.loss_rows", self.loss_rows, rule)
