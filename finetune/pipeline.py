"""DeepSpeed's pipeline for ``tessera-finetune pretrain``: stages over transformers' own layers, with the state of any stage in reach.

What always holds: a loss or gradient that is not finite on any rank changes no weight and no moment on any rank; a weight that
two stages use (tied embeddings) is the same bits on both, is updated once and counted once.

Rank r of R with S stages is on stage r // (R / S) and takes the share r % (R / S) of the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule as ds_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipeline
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import nn
from transformers import PreTrainedModel

from finetune import partition
from finetune.config import TuneConfig, to_deepspeed
from finetune.data.batches import Microbatch
from finetune.errors import ConfigError
from finetune.model import decay_groups, token_losses
from finetune.partition import Bounds
from finetune.profile import measure
from finetune.stages import Layer, build_on_meta, check_family, give_memory, lent_memory, num_parameters, positions_of, split, type_of
from finetune.types import StepOutcome

MOMENTS = ("exp_avg", "exp_avg_sq")


class _Stages(PipelineModule):
    """The layers of this rank's stage, by bounds that were chosen before."""

    def __init__(self, layers: Sequence[Layer], bounds: Bounds, loss: Callable[[Any, Any], torch.Tensor]) -> None:
        self._chosen = bounds  # the constructor below asks for it
        super().__init__(layers=layers, num_stages=len(bounds) - 1, loss_fn=loss, partition_method="chosen")

    def _partition_layers(self, method: str = "chosen") -> None:
        self.parts = list(self._chosen)
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


class _Schedule(DeepSpeedPipeline):
    """DeepSpeed's schedule, with the end of a step in our hands."""

    def __init__(self, ends: PipelineEngine, module: _Stages, optimizer: torch.optim.Optimizer, json: dict[str, Any]) -> None:
        self._ends = ends
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

    def _exec_reduce_tied_grads(self) -> None:
        self._ends._reduce_tied_gradients()

    def _exec_reduce_grads(self) -> None:
        self._force_grad_boundary = True
        self._ends._reduce_gradients()
        self._force_grad_boundary = False

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        self._force_grad_boundary = True
        self._ends._finish_step()
        self._force_grad_boundary = False

    _INSTRUCTION_MAP = MappingProxyType(
        {
            **DeepSpeedPipeline._INSTRUCTION_MAP,
            ds_schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
            ds_schedule.ReduceGrads: _exec_reduce_grads,
            ds_schedule.OptimizerStep: _exec_optimizer_step,
        }
    )


class PipelineEngine:
    """One stage of a model under DeepSpeed's pipeline on this rank, ZeRO-0 or ZeRO-1 among the ranks of the stage.

    Every method is collective: all ranks call it, in the same order, all ranks of a pipeline with the same batches.
    """

    def __init__(
        self,
        config: TuneConfig,
        hf_config: Any,
        fill: Callable[[PreTrainedModel, Any], None],
        *,
        device: torch.device,
        precision: str,
    ) -> None:
        """Choose the stages, build this rank's, let ``fill(model, gather)`` set its weights, put the pipeline around it.

        Raises:
            ConfigError: the model cannot be split this way.
        """
        check_family(hf_config.model_type, "model_type")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.stages = config.pipeline.stages
        self.data_ranks = self.world_size // self.stages
        self.stage, self.data_rank = divmod(self.rank, self.data_ranks)
        self.device = device
        self._accumulation, self._clip = config.accumulation, config.optimizer.clip
        self._precision = precision
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32

        self.model = build_on_meta(hf_config, dtype)
        self._layers = split(self.model, device, checkpointed=config.pipeline.checkpoint_activations)
        self.costs: list[float] | None = None
        self.bounds = self._choose_bounds(config, dtype)
        self._stage_of = self._find_owners()
        mine = self._layers[self.bounds[self.stage] : self.bounds[self.stage + 1]]
        give_memory((parameter for layer in mine for parameter in layer.parameters()), torch.device("cpu"))
        fill(self.model, self.gather)
        self._tied, self._tied_group = self._find_tied()
        self._module = _Stages(self._layers, self.bounds, self._scaled_loss)
        # What another stage updates is not ours to update.
        groups = decay_groups(self.model, config.optimizer.weight_decay, only=dict(self._owned()))
        options = config.optimizer
        self._inner = torch.optim.AdamW(groups, lr=options.lr, betas=(options.betas[0], options.betas[1]), eps=options.eps)
        json = to_deepspeed(config, device=device.type, precision=precision, cpu_adam=False, pipeline=True)
        self._schedule = _Schedule(self, self._module, self._inner, json)
        self._wrapper = self._schedule.optimizer
        self._plain = self._wrapper is self._inner
        self._tied_gradient: torch.Tensor | None = None
        self._watch_tied_gradient()
        self._create_moments()
        self._guard_inner_step()
        self._skip_update = self._stop = False
        self._num_targets = 0
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._shapes: list[torch.Size] = []
        self._outcome: StepOutcome | None = None

    # -- stages

    def _choose_bounds(self, config: TuneConfig, dtype: torch.dtype) -> Bounds:
        method, layers, stages = config.pipeline.partition, self._layers, self.stages
        if len(layers) < stages:
            raise ConfigError(
                f"pipeline.stages is {stages}; it must be at most {len(layers)}, the layers of this model that can be apart "
                "(embeddings, each block, head)"
            )
        if method == "profile":
            self.costs = self._measure(config, dtype)
            return partition.balanced(self.costs, stages)
        if method == "parameters":
            return partition.balanced([num_parameters(layer) for layer in layers], stages)
        if method == "uniform":
            return partition.uniform(len(layers), stages)
        return partition.of_type([type_of(layer) for layer in layers], method.removeprefix("type:"), stages)

    def _measure(self, config: TuneConfig, dtype: torch.dtype) -> list[float]:
        """Seconds of each layer as rank 0 measures them, the same numbers on every rank."""
        costs = torch.zeros(len(self._layers), dtype=torch.float64, device=self.device)
        if self.rank == 0:
            seconds = measure(
                self._layers,
                token_losses,
                micro=config.batch.micro,
                seq_len=config.data.seq_len,
                hidden_size=self.model.config.hidden_size,
                device=self.device,
                dtype=dtype,
            )
            costs.copy_(torch.tensor(seconds, dtype=torch.float64))
        dist.broadcast(costs, src=0)
        return [float(cost) for cost in costs]

    def _find_owners(self) -> dict[str, int]:
        """Parameter name -> the stage that updates and saves it: the first that uses it."""
        stage_of: dict[int, int] = {}
        for stage in range(self.stages):
            for layer in self._layers[self.bounds[stage] : self.bounds[stage + 1]]:
                for parameter in layer.parameters():
                    stage_of.setdefault(id(parameter), stage)
        return {name: stage_of[id(parameter)] for name, parameter in self.model.named_parameters()}

    def _owned(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that this stage updates."""
        for name, parameter in self.model.named_parameters():
            if self._stage_of[name] == self.stage and parameter.requires_grad:
                yield name, parameter

    def describe(self) -> list[str]:
        """The stages, one line each: layers, parameters and, where they were measured, milliseconds of a micro-batch."""
        lines = []
        for stage in range(self.stages):
            start, stop = self.bounds[stage], self.bounds[stage + 1]
            parameters = sum(num_parameters(layer) for layer in self._layers[start:stop])
            line = f"stage {stage}: {_summary(self._layers[start:stop])}; {parameters:,} parameters"
            if self.costs is not None:
                line += f"; {1000 * sum(self.costs[start:stop]):.1f} ms"
            lines.append(line)
        if self.costs is not None and self.stages > 1:
            totals = [sum(self.costs[self.bounds[s] : self.bounds[s + 1]]) for s in range(self.stages)]
            lines.append(f"slowest stage: {max(totals) / (sum(totals) / len(totals)):.2f} x the mean")
        return lines

    @contextmanager
    def gather(self, parameters: list[nn.Parameter]) -> Iterator[bool]:
        """Memory for a moment for parameters of other stages: rules for new weights draw the same numbers on every rank."""
        with lent_memory(parameters, torch.device("cpu")):
            yield True

    # -- tied weights

    def _find_tied(self) -> tuple[nn.Parameter | None, Any]:
        """The weight that the first and the last stage share, on those stages, and the group of the two ranks."""
        tied = self.model.get_output_embeddings().weight
        if self.stages == 1 or tied is not self.model.get_input_embeddings().weight:
            return None, None
        mine = None
        for number in range(self.data_ranks):
            ranks = [number, (self.stages - 1) * self.data_ranks + number]
            group = dist.new_group(ranks)
            if self.rank in ranks:
                mine = group
        return (tied, mine) if mine is not None else (None, None)

    def _watch_tied_gradient(self) -> None:
        """Add up the gradient of the head's copy in fp32, as DeepSpeed does for weights it updates."""
        if self._tied is None or self.stage == 0 or self._plain or self._precision == "fp32":
            return

        def add(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None, "called once a gradient was accumulated"
            if self._tied_gradient is None:
                self._tied_gradient = torch.zeros_like(parameter, dtype=torch.float32)
            self._tied_gradient += parameter.grad
            parameter.grad = None

        self._tied.register_post_accumulate_grad_hook(add)

    def _reduce_tied_gradients(self) -> None:
        """Add the head's part of a tied gradient to that of the embeddings, which alone are updated."""
        if self._tied is None:
            return
        if self.stage == 0:
            gradient = getattr(self._tied, "_hp_grad", None) if self._precision == "bf16" else self._tied.grad
        else:
            gradient = self._tied.grad if self._tied_gradient is None else self._tied_gradient
            self._tied_gradient = self._tied.grad = None
        assert gradient is not None, "both ends of a tied weight have a gradient"
        dist.reduce(gradient, dst=self.data_rank, group=self._tied_group)

    # -- training

    def train_step(self, batches: Sequence[Microbatch], rate: float, *, stop: bool = False) -> StepOutcome:
        """One optimizer step over this pipeline's micro-batches, normalised by the target tokens of all ranks together."""
        assert len(batches) == self._accumulation, "a step takes exactly the configured number of micro-batches"
        for group in self._inner.param_groups:
            group["lr"] = rate
        counted = sum(batch.num_targets for batch in batches) if self.stage == 0 else 0
        self._num_targets = int(self._sum(float(counted))[0])
        self._stop, self._outcome = stop, None
        self._fit_shapes(batches)
        self._loss_sum.zero_()
        self._schedule.train_batch(map(_flow, batches))
        assert self._outcome is not None, "DeepSpeed's schedule ends with the optimizer's step"
        return self._outcome

    def _fit_shapes(self, batches: Sequence[Microbatch]) -> None:
        """DeepSpeed tells the next stage shapes once, unless told that they change."""
        shapes = [_flow_shape(batch) for batch in batches]
        self._schedule.dynamic_shape = len(set(shapes)) > 1
        if shapes[:1] != self._shapes:
            self._schedule.reset_activation_shape()
        self._shapes = shapes[:1] if not self._schedule.dynamic_shape else []

    def _scaled_loss(self, logits_BLV: torch.Tensor, targets_BL: torch.Tensor) -> torch.Tensor:
        loss = token_losses(logits_BLV, targets_BL)
        self._loss_sum += loss.detach()
        # DeepSpeed divides by accumulation and by the ranks of a stage; what must remain is the mean over targets.
        return loss * (self._accumulation * self.data_ranks / max(1, self._num_targets))

    def _reduce_gradients(self) -> None:
        """Average over the ranks of this stage."""
        if self._plain:
            gradients = [parameter.grad for _, parameter in self._owned() if parameter.grad is not None]
            if self.data_ranks > 1:
                self._schedule.buffered_allreduce_fallback(grads=gradients)
        elif self._precision == "bf16":
            self._schedule._bf16_reduce_grads()
        else:
            self._schedule.allreduce_gradients()

    def _finish_step(self) -> None:
        """Decide on all ranks together whether the step counts, clip, and update."""
        gradients = self._reduced_gradients()
        norm = float(torch.stack(torch._foreach_norm(gradients)).double().norm())
        loss_sum = float(self._loss_sum)
        bad_loss, bad_gradient = not math.isfinite(loss_sum), not math.isfinite(norm)
        share = 1 / self.data_ranks if self._plain else 1.0  # without ZeRO every rank of a stage holds all of its gradient
        loss_total, squares, losses, bad, stops = self._sum(
            0.0 if bad_loss else loss_sum,
            0.0 if bad_gradient else share * norm * norm,
            float(bad_loss),
            float(bad_gradient),
            float(self._stop),
        )
        skipped = "loss" if losses else "gradient" if bad else None
        norm = math.sqrt(squares)
        if skipped is None and self._clip and norm > self._clip:
            torch._foreach_mul_(gradients, self._clip / (norm + 1e-6))
        self._skip_update = skipped is not None
        self._schedule._take_model_step(None)
        if self._tied is not None:
            self._tied.grad = None
            if skipped is None:
                dist.broadcast(self._tied.data, src=self.data_rank, group=self._tied_group)
        mean = loss_total / max(1, self._num_targets)
        self._outcome = StepOutcome(
            float("nan") if losses else mean, float("nan") if skipped else norm, self._num_targets, skipped, stops > 0
        )

    def _reduced_gradients(self) -> list[torch.Tensor]:
        """The parts of the reduced gradient that this rank updates with."""
        if self._plain:
            pieces = [parameter.grad for _, parameter in self._owned() if parameter.grad is not None]
        elif self._precision == "bf16":
            pieces = list(self._wrapper.fp32_groups_gradient_flat_partition)
        else:
            pieces = [piece for group in self._wrapper.averaged_gradients.values() for piece in group or ()]
        assert pieces, "DeepSpeed keeps its reduced gradients elsewhere than this release was written for"
        return pieces

    def _guard_inner_step(self) -> None:
        """Make the update itself refuse a skipped step: DeepSpeed's clean-up around it runs as after any other step."""
        update = self._inner.step

        def guarded(*args: Any, **kwargs: Any) -> Any:
            return None if self._skip_update else update(*args, **kwargs)

        self._inner.step = guarded  # type: ignore[method-assign]

    def evaluate(self, batches: Sequence[Microbatch]) -> tuple[float, int]:
        """Sum of the losses and number of targets over all ranks; every pipeline must bring equally many batches."""
        self._fit_shapes(batches)
        self._loss_sum.zero_()
        self._schedule.eval_batch(
            map(_flow, batches), reduce_output=None, bcast_loss=False, num_micro_batches=len(batches)
        )
        counted = sum(batch.num_targets for batch in batches) if self.stage == 0 else 0
        total, count = self._sum(float(self._loss_sum), float(counted))
        return total, int(count)

    def _sum(self, *values: float) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor]

    def agree(self, good: bool) -> bool:
        """Whether ``good`` is true on every rank."""
        return self._sum(float(not good))[0] == 0

    # -- state, one parameter at a time

    @torch.no_grad()
    def weights(self, dtype: torch.dtype, *, exact: bool = False) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every parameter once, whole, on CPU in ``dtype``, on rank 0 alone (``None`` elsewhere).

        Args:
            exact: take the optimizer's fp32 weights instead of those that compute.
        """
        for name, parameter in self.model.named_parameters():
            if exact and parameter.requires_grad:
                whole = self._to_first(name, parameter, torch.float32, self._exact)
            else:
                whole = self._to_first(name, parameter, parameter.dtype, nn.Parameter.detach)
            yield name, None if whole is None else whole.to("cpu", dtype)

    @torch.no_grad()
    def moments(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """``exp_avg.<name>`` and ``exp_avg_sq.<name>`` of every trained parameter, whole, fp32, on rank 0 alone."""
        for key in MOMENTS:
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    whole = self._to_first(name, parameter, torch.float32, lambda own, key=key: self._moment(own, key))
                    yield f"{key}.{name}", None if whole is None else whole.to("cpu", torch.float32)

    def _to_first(
        self, name: str, parameter: nn.Parameter, dtype: torch.dtype, read: Callable[[nn.Parameter], torch.Tensor]
    ) -> torch.Tensor | None:
        """What ``read`` gives on the owning stage, on rank 0; ``read`` is called by all ranks of that stage."""
        stage = self._stage_of[name]
        whole = read(parameter) if stage == self.stage else None
        if stage == 0:
            return whole if self.rank == 0 else None
        sender = stage * self.data_ranks
        if self.rank == sender:
            assert whole is not None, "the sender is on the owning stage"
            dist.send(whole.contiguous(), dst=0)
        elif self.rank == 0:
            whole = torch.empty(parameter.shape, dtype=dtype, device=self.device)
            dist.recv(whole, src=sender)
            return whole
        return None

    def _exact(self, parameter: nn.Parameter) -> torch.Tensor:
        whole: torch.Tensor = parameter.detach() if self._plain else safe_get_full_fp32_param(parameter)
        return whole

    def _moment(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        whole: torch.Tensor = (
            self._inner.state[parameter][key] if self._plain else safe_get_full_optimizer_state(parameter, key)
        )
        return whole

    @torch.no_grad()
    def set_exact_weights(self, read: Callable[[str], torch.Tensor]) -> None:
        """Set the optimizer's fp32 weights from ``read(name)``; those that compute must have been filled with the same."""
        for name, parameter in self._owned():
            if self._plain:
                parameter.copy_(read(name))
            else:
                safe_set_full_fp32_param(parameter, read(name).to(self.device))

    @torch.no_grad()
    def set_moments(self, read: Callable[[str], torch.Tensor], adam_steps: int) -> None:
        """Set the moments from ``read('exp_avg.<name>')`` and so on, and the number of updates the optimizer has made."""
        for name, parameter in self._owned():
            for key in MOMENTS:
                value = read(f"{key}.{name}").to(self.device)
                if self._plain:
                    self._inner.state[parameter][key].copy_(value)
                else:
                    safe_set_full_optimizer_state(parameter, value, key)
        for tensor in self._updated():
            self._inner.state[tensor]["step"].fill_(adam_steps)

    @property
    def adam_steps(self) -> int:
        """Updates the optimizer has made: steps taken without the skipped ones."""
        return int(self._inner.state[self._updated()[0]]["step"])

    def _updated(self) -> list[torch.Tensor]:
        """The tensors that the optimizer updates on this rank: parameters, or this rank's flat part of them."""
        if self._plain:
            return [parameter for _, parameter in self._owned()]
        if self._precision == "bf16":
            return list(self._wrapper.fp32_groups_flat_partition)
        return list(self._wrapper.single_partition_of_fp32_groups)

    def _create_moments(self) -> None:
        """Create the moments now, as the optimizer would in its first step, so that they can be saved and set at any time."""
        for tensor in self._updated():
            moments = {key: torch.zeros_like(tensor, dtype=torch.float32) for key in MOMENTS}
            self._inner.state[tensor] = {"step": torch.tensor(0.0), **moments}
        if not self._plain:
            self._wrapper._lazy_init_hp_params_optimizer_state()

    # -- random states

    def rng_states(self) -> list[torch.Tensor]:
        """The random state of every rank's device, uint8, by rank."""
        mine = (torch.cuda.get_rng_state() if self.device.type == "cuda" else torch.get_rng_state()).to(self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        return [state.cpu() for state in everyone]

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set this rank's random state."""
        torch.cuda.set_rng_state(state) if self.device.type == "cuda" else torch.set_rng_state(state)

    def close(self) -> None:
        """Leave the ranks."""
        self._schedule.destroy()
        dist.barrier()
        dist.destroy_process_group()


def _flow(batch: Microbatch) -> tuple[Any, torch.Tensor]:
    """What goes into the first stage, and the targets for the last."""
    if batch.segments is None:
        return batch.inputs, batch.targets
    return (batch.inputs, positions_of(batch.segments)), batch.targets


def _flow_shape(batch: Microbatch) -> tuple[Any, ...]:
    return (*batch.inputs.shape, batch.segments is not None)


def _summary(layers: Sequence[Layer]) -> str:
    """``embedding, 6 blocks`` and so on."""
    counts: dict[str, int] = {}
    for layer in layers:
        counts[layer.kind] = counts.get(layer.kind, 0) + 1
    return ", ".join(f"{count} {kind}s" if count > 1 else f"1 {kind}" if kind == "block" else kind for kind, count in counts.items())
