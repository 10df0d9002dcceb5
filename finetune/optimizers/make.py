"""The optimizers of both engines, but for the one DeepSpeed builds for the host."""

from __future__ import annotations

from typing import Any

import torch

from finetune.config import OptimizerConfig
from finetune.optimizers.adafactor import Adafactor
from finetune.optimizers.lion import Lion
from finetune.optimizers.muon import Muon


def make_optimizer(options: OptimizerConfig, groups: list[dict[str, Any]], matrices: frozenset[str]) -> torch.optim.Optimizer:
    """The optimizer of ``optimizer.name`` over parameters in ``groups``, see ``finetune.optimizers.state``.

    Args:
        matrices: names of the parameters it treats as matrices.
    """
    lr, eps, betas = options.lr, options.eps, (options.betas[0], options.betas[1])
    assert lr is not None, "the learning rate is settled before anything is built"
    if options.name == "lion":
        return Lion(groups, lr=lr, betas=betas)
    if options.name == "adafactor":
        return Adafactor(groups, matrices=matrices, lr=lr)
    if options.name == "muon":
        return Muon(groups, matrices=matrices, lr=lr, momentum=options.momentum, betas=betas, eps=eps)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)  # one pass over memory instead of ten
