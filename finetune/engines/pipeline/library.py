"""DeepSpeed's pipeline as far as we use it, with types: it has none of its own. What the names mean is DeepSpeed's to say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn


class Wrapper(Protocol):
    """What DeepSpeed puts around a stage's optimizer: ``BF16_Optimizer``, or ``DeepSpeedZeroOptimizer`` in fp32."""

    fp32_groups_flat_partition: Sequence[torch.Tensor]
    fp32_groups_gradient_flat_partition: Sequence[torch.Tensor]
    bf16_groups: Sequence[Sequence[nn.Parameter]]
    """Attribute of ``BF16_Optimizer``, as are the two above."""

    bit16_groups: Sequence[Sequence[nn.Parameter]]
    single_partition_of_fp32_groups: Sequence[torch.Tensor]
    averaged_gradients: Mapping[int, Sequence[torch.Tensor] | None]
    allreduce_bucket: Callable[..., torch.Tensor]
    overlap_comm: bool
    setup_buckets: Callable[[], None]
    reduce_gradients: Callable[..., None]
    """Attribute of ``DeepSpeedZeroOptimizer``, as are the six above."""

    def is_gradient_accumulation_boundary(self) -> bool: ...

    def update_hp_grads(self) -> None: ...

    def _lazy_init_hp_params_optimizer_state(self) -> None: ...


class _Topology(Protocol):
    def get_data_parallel_group(self) -> dist.ProcessGroup: ...


class Schedule(Protocol):
    """DeepSpeed's ``PipelineEngine``."""

    optimizer: object
    """A ``Wrapper``, or the bare optimizer it was given."""
    mpu: _Topology
    dynamic_shape: bool

    def train_batch(self, data_iter: Iterable[object]) -> object: ...

    def eval_batch(
        self, data_iter: Iterable[object], *, reduce_output: None, bcast_loss: bool, num_micro_batches: int
    ) -> object: ...

    def reset_activation_shape(self) -> None: ...

    def buffered_allreduce_fallback(self, *, grads: Sequence[torch.Tensor]) -> None: ...

    def allreduce_gradients(self) -> None: ...

    def _bf16_reduce_grads(self) -> None: ...

    def _take_model_step(self, lr_kwargs: None) -> None: ...

    def destroy(self) -> None: ...
