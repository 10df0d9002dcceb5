"""AdamW (arXiv 1711.05101): torch's own, and its update for optimizers that have it for some of their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from finetune.config import TuneConfig
from finetune.optimizers.kind import Groups, OptimizerKind, betas_of, rate_of


def make_adamw(config: TuneConfig, groups: Groups, matrices: frozenset[str]) -> torch.optim.Optimizer:
    """torch's, fused: one pass over memory instead of ten."""
    options = config.optimizer
    return torch.optim.AdamW(groups, lr=rate_of(config), betas=betas_of(config), eps=options.eps, fused=True)


# No scratch: torch's fused one and DeepSpeed's on the CPU go over the weights once.
KIND = OptimizerKind(make=make_adamw, state=("exp_avg", "exp_avg_sq"))


def adamw(group: Mapping[str, Any], flat: torch.Tensor, state: Mapping[str, Any]) -> None:
    """AdamW (arXiv 1711.05101), element by element."""
    rate, (first_beta, second_beta), steps = group["lr"], group["betas"], state["step"]
    gradient, first, second = flat.grad, state["exp_avg"], state["exp_avg_sq"]
    assert gradient is not None
    first.lerp_(gradient, 1.0 - first_beta)
    second.mul_(second_beta).addcmul_(gradient, gradient, value=1.0 - second_beta)
    root = second.sqrt().div_(math.sqrt(1.0 - second_beta**steps)).add_(group["eps"])
    flat.mul_(1.0 - rate * group["weight_decay"]).addcdiv_(first, root, value=-rate / (1.0 - first_beta**steps))
