"""DeepSpeed's pipe engine as our pipeline uses it: stages cut where we chose, and the end of a step in our hands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule as instructions
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipeline
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.precision_config import DeepSpeedBF16Config
from deepspeed.utils.timer import NoopTimer
from torch import nn

from finetune.engines.pipeline.layers import Layer
from finetune.engines.pipeline.library import Wrapper
from finetune.engines.pipeline.partition import Bounds


class StageModule(PipelineModule):  # type: ignore[misc]  # DeepSpeed has no types
    """The layers of this rank's stage, by bounds that were chosen before."""

    idle: nn.Parameter | None
    """Something to update for the optimizer of a stage that only has copies of others' weights."""

    def __init__(self, layers: Sequence[Layer], bounds: Bounds) -> None:
        self._chosen = bounds  # the constructor below asks for it
        super().__init__(layers=layers, num_stages=len(bounds) - 1, loss_fn=None, partition_method="chosen")
        self.register_parameter("idle", None)

    def _partition_layers(self, method: str = "chosen") -> None:
        self.parts = list(self._chosen)
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def add_idle_parameter(self) -> nn.Parameter:
        """Give the stage a parameter that no layer uses, one 0, for its optimizer to have something; returns it."""
        self.idle = nn.Parameter(torch.zeros(1, dtype=next(self.parameters()).dtype, device=next(self.parameters()).device))
        return self.idle


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """What is done, in this order, once all micro-batches of a step were computed. All ranks do it together."""

    add_shared_gradients: Callable[[], None]
    """Over the stages that use a weight."""
    reduce_gradients: Callable[[], None]
    """Over the ranks of a stage."""
    update: Callable[[], None]


class PipeSchedule(DeepSpeedPipeline):  # type: ignore[misc]  # DeepSpeed has no types
    """DeepSpeed's schedule of forward and backward passes, with an end of our own."""

    def __init__(self, end: StepEnd, module: StageModule, optimizer: torch.optim.Optimizer, json: dict[str, Any]) -> None:
        self._end = end
        config = DeepSpeedConfig(json, module.mpu())
        super().__init__(
            args=None,
            model=module,
            optimizer=optimizer,
            mpu=module.mpu(),
            dist_init_required=False,
            config=json,
            config_class=config,
        )

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer) -> Wrapper:
        """Put DeepSpeed's optimizer for bf16 around ``optimizer`` in fp16 too: nothing in it but its name depends on the type.

        It adds up gradients in fp32. Those DeepSpeed has for fp16 add up in fp16, where the sum over many micro-batches, ranks
        or copies of a weight overflows, or loses its last digits, although no single gradient does. They also scale the loss by
        themselves, of which a head in pieces has several.
        """
        if not self.fp16_enabled():
            made: Wrapper = super()._configure_zero_optimizer(optimizer)
            return made
        in_fp32: Wrapper = BF16_Optimizer(
            optimizer,
            self.param_names,
            bfloat16_config=DeepSpeedBF16Config(enabled=True),
            mpu=self.mpu,
            allgather_bucket_size=self.zero_allgather_bucket_size(),
            dp_process_group=self.seq_data_parallel_group,
            timers=NoopTimer(),
            grad_acc_dtype=torch.float32,
        )
        return in_fp32

    def _exec_reduce_tied_grads(self) -> None:
        self._end.add_shared_gradients()

    def _exec_reduce_grads(self) -> None:
        self._force_grad_boundary = True
        self._end.reduce_gradients()
        self._force_grad_boundary = False

    def _exec_optimizer_step(self, lr_kwargs: object = None) -> None:
        self._force_grad_boundary = True
        self._end.update()
        self._force_grad_boundary = False

    _INSTRUCTION_MAP = MappingProxyType(
        {
            **DeepSpeedPipeline._INSTRUCTION_MAP,
            instructions.ReduceTiedGrads: _exec_reduce_tied_grads,
            instructions.ReduceGrads: _exec_reduce_grads,
            instructions.OptimizerStep: _exec_optimizer_step,
        }
    )
