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
from finetune.engines.buckets import make_bucket_late, reduce_in_place
from finetune.engines.optimizer import EngineOptimizer
from finetune.engines.pipeline.library import Schedule, Wrapper
from finetune.optimizers.fragments import Fragments, all_of, ranges_of


class StageOptimizer(EngineOptimizer):
    """What one rank updates of its stage. Methods that touch tensors are collective among the ranks of a stage."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        schedule: Schedule,
        names: Mapping[nn.Parameter, str],
        state_keys: Mapping[str, tuple[str, ...]],
        device: torch.device,
    ) -> None:
        """Reach into what DeepSpeed made of ``inner``, and create its state.

        Args:
            names: of all parameters that this stage updates.
            state_keys: of each, see ``optimizers.kind``.
        """
        super().__init__([inner], state_keys, device)
        self._schedule = schedule
        self.plain = schedule.optimizer is inner
        """Whether every rank of the stage updates all of it, each by itself."""
        self._wrapper = cast(Wrapper, schedule.optimizer)  # asked for nothing where there is none
        self.sums_in_fp32 = isinstance(self._wrapper, BF16_Optimizer)
        """Whether gradients are of 16 bits, and added up in fp32."""
        if not self.plain and not self.sums_in_fp32:
            reduce_in_place(self._wrapper)
            make_bucket_late(self._wrapper)
        # Without ZeRO every rank of a stage updates all of its weights by itself.
        self._create_state(self._find_fragments(names), Peers.alone() if self.plain else self._peers())

    # -- a step

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
            gradients = [parameter.grad for parameter in self.updated() if parameter.grad is not None]
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
            pieces = [parameter.grad for parameter in self.updated() if parameter.grad is not None]
        elif self.sums_in_fp32:
            pieces = list(self._wrapper.fp32_groups_gradient_flat_partition)
        else:
            pieces = [piece for group in self._wrapper.averaged_gradients.values() for piece in group or ()]
        assert pieces, "DeepSpeed keeps its reduced gradients elsewhere than this release was written for"
        return pieces

    def update(self) -> bool:
        """Update, unless that is to be skipped, and forget the gradients."""
        self._schedule._take_model_step(None)
        return not self.skip_update

    # -- state

    def master_weight(self, parameter: nn.Parameter) -> torch.Tensor:
        """A parameter's fp32 weight, which the optimizer updates: whole, gathered from the ranks of the stage."""
        whole: torch.Tensor = parameter.detach() if self.plain else safe_get_full_fp32_param(parameter)
        return whole

    def set_master_weight(self, parameter: nn.Parameter, whole: torch.Tensor) -> None:
        """Set a parameter's fp32 weight from all of it."""
        if self.plain:
            parameter.copy_(whole)
        else:
            safe_set_full_fp32_param(parameter, whole.to(self._device))

    def state_of(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """What is kept of a parameter under ``key``, whole."""
        whole: torch.Tensor = self._inner.state[parameter][key] if self.plain else safe_get_full_optimizer_state(parameter, key)
        return whole

    def set_state_of(self, parameter: nn.Parameter, key: str, whole: torch.Tensor) -> None:
        """Set what is kept of a parameter under ``key`` from all of it."""
        value = whole.to(self._device)
        if self.plain:
            self._inner.state[parameter][key].copy_(value)
        else:
            safe_set_full_optimizer_state(parameter, value, key)

    def updated(self) -> list[torch.Tensor]:
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

    def _link_state(self) -> None:
        if not self.plain:
            self._wrapper._lazy_init_hp_params_optimizer_state()

    def _peers(self) -> Peers:
        return Peers.of(self._schedule.mpu.get_data_parallel_group())
