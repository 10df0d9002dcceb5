"""How a step is made: batches, optimizer, schedule."""

from __future__ import annotations

import math
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from finetune.config.checks import require

_FILES: Final = Path(__file__).parents[1] / "optimizers" / "algorithms"
ALGORITHMS: Final = tuple(sorted(module.name for module in pkgutil.iter_modules([str(_FILES)])))
"""Every way of updating weights: a file each of ``finetune/optimizers/algorithms/``, by the names of which they are known here.

They import torch, so they are not imported to tell what there is.
"""

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(name for name in ALGORITHMS if name != "zenflow")]  # that one is a method of offloading


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """Samples of one optimizer step: ``micro`` x ``accumulation`` x ranks."""

    micro: int = 8
    """Samples one rank computes at once."""

    accumulation: int | None = None
    """Micro-batches whose gradients are added before a step; unset: 1, or what ``total`` asks for."""

    total: int | None = None
    """Samples of one step, all ranks together; unset: micro x accumulation x ranks."""

    def __post_init__(self) -> None:
        for name in ("micro", "accumulation", "total"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"batch.{name}", value, "be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """How gradients become updates. Biases and norms are not decayed."""

    name: OptimizerName = "adamw"
    """``adamw`` (DeepSpeed's CPU Adam when offloaded), ``lion`` (signs of a momentum: half the state, a learning rate about
    a third to a tenth of AdamW's), ``muon`` (matrices move along their momentum made orthogonal, embeddings, output layer and
    vectors as by AdamW: half the state of matrices, AdamW's learning rate), or ``adafactor`` (a second moment by rows and
    columns: almost no state; takes neither ``betas`` nor ``eps``)."""

    lr: float | None = None
    """Learning rate after warm-up; unset: that of the state a run is resumed from, else 2e-5 for an existing model trained in
    full, 2e-4 for adapters, 3e-4 for a new model."""

    betas: tuple[float, ...] = (0.9, 0.95)
    """Decay of the first and second moment; for ``lion`` of the update and of the momentum; for ``muon`` of what AdamW does."""

    momentum: float = 0.95
    """Decay of the momentum of ``muon``'s matrices; the others do not use it."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and embeddings."""

    clip: float = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""

    def __post_init__(self) -> None:
        require(self.lr is None or (math.isfinite(self.lr) and self.lr > 0), "optimizer.lr", self.lr, "be greater than 0")
        require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            "optimizer.betas",
            list(self.betas),
            "be two numbers from 0 to 1, 1 excluded",
        )
        require(0 <= self.momentum < 1, "optimizer.momentum", self.momentum, "lie between 0 and 1, 1 excluded")
        # Below, fp32 would hold none, and a gradient of zero would be divided by zero.
        require(math.isfinite(self.eps) and self.eps >= 1e-30, "optimizer.eps", self.eps, "be at least 1e-30")
        for name in ("weight_decay", "clip"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, f"optimizer.{name}", value, "be 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Linear warm-up, then a shape that ends at a floor at the last step."""

    shape: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    """After warm-up: ``constant``, ``linear``, ``cosine``, ``wsd`` (constant, then a linear fall over ``decay``), or
    ``inverse_sqrt``."""

    steps: int | None = None
    """Optimizer steps; unset: ``epochs`` passes over the data."""

    epochs: float = 1.0
    """Passes over the training data when ``steps`` is unset."""

    warmup: float = 0.05
    """Warm-up: below 1 a share of all steps, from 1 on a number of steps."""

    floor: float = 0.1
    """Learning rate at the end, as a share of ``optimizer.lr``."""

    decay: float = 0.1
    """The fall at the end of ``wsd``: below 1 a share of all steps, from 1 on a number of steps."""

    def __post_init__(self) -> None:
        require(self.steps is None or self.steps >= 1, "schedule.steps", self.steps, "be at least 1")
        require(math.isfinite(self.epochs) and self.epochs > 0, "schedule.epochs", self.epochs, "be greater than 0")
        for name in ("warmup", "decay"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, f"schedule.{name}", value, "be 0 or more")
        require(0.0 <= self.floor <= 1.0, "schedule.floor", self.floor, "lie between 0 and 1")
