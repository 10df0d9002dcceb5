"""DeepSpeed's ZeRO as far as we use it, with types: it has none of its own. What the names mean is DeepSpeed's to say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn


class Answer(Protocol):
    """What a causal language model answers."""

    logits: torch.Tensor


class Zero(Protocol):
    """``DeepSpeedZeroOptimizer`` (stages 1 and 2) and ``DeepSpeedZeroOptimizer_Stage3``: a stage has what it is asked for."""

    optimizer: torch.optim.Optimizer
    """The one it was given, which updates flat fp32 tensors."""
    backup_optimizer: torch.optim.Optimizer
    """With ``offload.ratio`` below 1: updates what stays on the device."""
    subgroup_to_device: Mapping[int, str]
    overflow: bool | torch.Tensor
    allreduce_bucket: Callable[..., torch.Tensor]
    overlap_comm: bool
    setup_buckets: Callable[[], None]
    reduce_gradients: Callable[..., None]

    fp16_groups: Sequence[Sequence[nn.Parameter]]
    fp32_partitioned_groups_flat: Sequence[torch.Tensor]
    """The optimizer's fp32 weights under stage 3, a flat tensor each."""
    bit16_groups: Sequence[Sequence[nn.Parameter]]
    single_partition_of_fp32_groups: Sequence[torch.Tensor]
    """The optimizer's fp32 weights under stages 1 and 2, this rank's part of each group."""
    averaged_gradients: Mapping[int, Sequence[torch.Tensor] | None]
    norm_for_param_grads: Mapping[int, float | torch.Tensor]
    """By ``get_param_id``; on NVMe, where the gradients are files."""

    def get_param_id(self, parameter: nn.Parameter) -> int: ...

    def is_gradient_accumulation_boundary(self) -> bool: ...

    def override_loss_scale(self, loss_scale: float) -> None: ...

    def _lazy_init_hp_params_optimizer_state(self) -> None: ...

    def _swappable_optimizer_subgroup(self, number: int) -> bool: ...

    def _optimizer_states_and_gradient_swap_in(self, number: int) -> None: ...

    def _optimizer_states_and_gradient_swap_out(self, number: int) -> None: ...


class Engine(Protocol):
    """What we call of ``DeepSpeedEngine``, which has no types."""

    module: nn.Module
    optimizer: Zero

    def __call__(self, **inputs: object) -> Answer: ...

    def train(self) -> object: ...

    def eval(self) -> object: ...

    def backward(self, loss: torch.Tensor) -> object: ...

    def step(self) -> None: ...

    def get_global_grad_norm(self) -> float | torch.Tensor | None:
        """Norm of the whole gradient of the last step, before clipping; ``None`` where it was not taken."""
        ...

    def destroy(self) -> None: ...
