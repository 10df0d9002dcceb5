"""Lion: the sign of an interpolated momentum as the update (Chen et al., 2023, arXiv 2302.06675)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from finetune.config import TuneConfig
from finetune.optimizers.kind import Groups, OptimizerKind, betas_of, rate_of, two_of_a_group


class Lion(torch.optim.Optimizer):
    """Decoupled weight decay; one state per parameter, ``exp_avg``. Works element by element, so on ZeRO's flat pieces too."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch's other form gives back a loss
        """One update of every parameter that has a gradient."""
        assert closure is None, "DeepSpeed calls it without one"
        for group in self.param_groups:
            rate, (update_beta, momentum_beta), decay = group["lr"], group["betas"], group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(parameter, dtype=torch.float32))
                momentum, gradient = state["exp_avg"], parameter.grad
                direction = momentum.lerp(gradient, 1.0 - update_beta).sign_()
                parameter.mul_(1.0 - rate * decay).add_(direction, alpha=-rate)
                momentum.lerp_(gradient, 1.0 - momentum_beta)
                state["step"] += 1


def make_lion(config: TuneConfig, groups: Groups, matrices: frozenset[str]) -> torch.optim.Optimizer:
    """Build a run's Lion; of ``optimizer`` in the configuration it takes ``lr`` and ``betas``."""
    return Lion(groups, lr=rate_of(config), betas=betas_of(config))


KIND = OptimizerKind(make=make_lion, state=("exp_avg",), scratch=two_of_a_group)
