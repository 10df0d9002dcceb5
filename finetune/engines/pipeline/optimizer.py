"""The optimizer of one pipeline stage on this rank, with what DeepSpeed puts around it: its tensors in reach.

DeepSpeed keeps them in one of three ways. Without ZeRO the optimizer updates the parameters themselves. Under ZeRO-1 in fp32
it updates this rank's part of them, laid end to end. In 16 bits it updates an fp32 copy of that part, and gradients add up in
fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import nn

from finetune.distributed import Peers
from finetune.engines.buckets import reduce_in_place
from finetune.engines.guard import guard_update
from finetune.engines.pipeline.library import Schedule, Wrapper
from finetune.optimizers.base import ShardedOptimizer
from finetune.optimizers.fragments import Fragments, all_of, ranges_of
from finetune.optimizers.state import no_updates, updates_made


class StageOptimizer:
    """What one rank updates of its stage. Methods that touch tensors are collective among the ranks of a stage."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        schedule: Schedule,
        names: Mapping[nn.Parameter, str],
        moments: Mapping[str, tuple[str, ...]],
        device: torch.device,
    ) -> None:
        """Reach into what DeepSpeed made of ``inner``, and create its moments.

        Args:
            names: of all parameters that this stage updates.
            moments: keys of the state of each, see ``finetune.optimizers.state``.
        """
        self._inner, self._schedule, self._device = inner, schedule, device
        self.plain = schedule.optimizer is inner
        """Whether every rank of the stage updates all of it, each by itself."""
        self._wrapper = cast(Wrapper, schedule.optimizer)  # asked for nothing where there is none
        self.sums_in_fp32 = isinstance(self._wrapper, BF16_Optimizer)
        """Whether gradients are of 16 bits, and added up in fp32."""
        if not self.plain and not self.sums_in_fp32:
            reduce_in_place(self._wrapper)
        self._moments = moments
        self._fragments = self._find_fragments(names)
        self._create_moments()
        self.skip_update = False
        """Whether the next update is to change nothing."""
        guard_update(inner, lambda: self.skip_update)

    # -- a step

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        for group in self._inner.param_groups:
            group["lr"] = rate

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """What has been added up of a parameter's gradient; ``None`` of none, and once ZeRO has cut it up."""
        return getattr(parameter, "_hp_grad", None) if self.sums_in_fp32 else parameter.grad

    def add_zeros(self, idle: nn.Parameter) -> None:
        """Give a parameter that nothing computes with the gradient that DeepSpeed's norm asks for."""
        idle.grad = torch.zeros_like(idle)
        if self.sums_in_fp32:
            self._wrapper.update_hp_grads()

    def reduce_gradients(self) -> None:
        """Average over the ranks of this stage."""
        alone = self._peers().size == 1
        if self.plain:
            gradients = [parameter.grad for parameter in self._updated() if parameter.grad is not None]
            if not alone:
                self._schedule.buffered_allreduce_fallback(grads=gradients)
        elif self.sums_in_fp32:
            if not alone:  # nobody to send a copy to, which DeepSpeed would make, of bf16 even rounded to 16 bits
                self._schedule._bf16_reduce_grads()
        else:
            self._schedule.allreduce_gradients()

    def reduced_gradients(self) -> list[torch.Tensor]:
        """The parts of the reduced gradient that this rank updates with."""
        if self.plain:
            pieces = [parameter.grad for parameter in self._updated() if parameter.grad is not None]
        elif self.sums_in_fp32:
            pieces = list(self._wrapper.fp32_groups_gradient_flat_partition)
        else:
            pieces = [piece for group in self._wrapper.averaged_gradients.values() for piece in group or ()]
        assert pieces, "DeepSpeed keeps its reduced gradients elsewhere than this release was written for"
        return pieces

    def update(self) -> None:
        """Update, unless it is to be skipped, and forget the gradients."""
        self._schedule._take_model_step(None)

    # -- state

    @property
    def updates(self) -> int:
        """Updates made: steps taken without the skipped ones."""
        return int(self._inner.state[self._updated()[0]]["step"])

    def set_updates(self, updates: int) -> None:
        """Set their number."""
        for tensor in self._updated():
            state = self._inner.state[tensor]
            state["step"] = updates_made(state["step"], updates)

    def master_weight(self, parameter: nn.Parameter) -> torch.Tensor:
        """A parameter's fp32 weight, whole."""
        whole: torch.Tensor = parameter.detach() if self.plain else safe_get_full_fp32_param(parameter)
        return whole

    def set_exact(self, parameter: nn.Parameter, whole: torch.Tensor) -> None:
        """Set it."""
        if self.plain:
            parameter.copy_(whole)
        else:
            safe_set_full_fp32_param(parameter, whole.to(self._device))

    def moment(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """One of a parameter's moments, whole."""
        whole: torch.Tensor = self._inner.state[parameter][key] if self.plain else safe_get_full_optimizer_state(parameter, key)
        return whole

    def set_moment(self, parameter: nn.Parameter, key: str, whole: torch.Tensor) -> None:
        """Set it."""
        value = whole.to(self._device)
        if self.plain:
            self._inner.state[parameter][key].copy_(value)
        else:
            safe_set_full_optimizer_state(parameter, value, key)

    @property
    def factors(self) -> dict[str, torch.Tensor]:
        """Of the weights of this stage, what Adafactor keeps whole."""
        return self._inner.whole if isinstance(self._inner, ShardedOptimizer) else {}

    def _updated(self) -> list[torch.Tensor]:
        """The tensors that are updated on this rank: parameters, or this rank's flat part of them."""
        if self.plain:
            return [parameter for group in self._inner.param_groups for parameter in group["params"]]
        if self.sums_in_fp32:
            return list(self._wrapper.fp32_groups_flat_partition)
        return list(self._wrapper.single_partition_of_fp32_groups)

    def _find_fragments(self, names: Mapping[nn.Parameter, str]) -> list[Fragments]:
        """What lies in each of the tensors that are updated, in their order."""
        if self.plain:
            return [all_of(parameter, names[parameter]) for group in self._inner.param_groups for parameter in group["params"]]
        return ranges_of(self._wrapper.bf16_groups if self.sums_in_fp32 else self._wrapper.bit16_groups, names)

    def _create_moments(self) -> None:
        """Create the moments now, as the optimizer would in its first step, so that they can be saved and set at any time."""
        for tensor, fragments in zip(self._updated(), self._fragments, strict=True):
            keys = self._moments[fragments[0].name]  # all parameters of one flat tensor have the same
            moments = {key: torch.zeros_like(tensor, dtype=torch.float32) for key in keys}
            self._inner.state[tensor] = {"step": no_updates(self._inner, tensor), **moments}
        if not self.plain:
            self._wrapper._lazy_init_hp_params_optimizer_state()
        if isinstance(self._inner, ShardedOptimizer):
            # Without ZeRO every rank of a stage updates all of its weights by itself.
            peers = Peers.alone() if self.plain else self._peers()
            self._inner.place(dict(zip(self._updated(), self._fragments, strict=True)), self._device, peers)

    def _peers(self) -> Peers:
        return Peers.of(self._schedule.mpu.get_data_parallel_group())
