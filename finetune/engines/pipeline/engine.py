"""DeepSpeed's pipeline for ``tessera-finetune pretrain``: stages over transformers' own layers, the state of each in reach.

What always holds: a loss or gradient that is not finite on any rank changes no weight and no moment on any rank; a weight that
several stages use (tied embeddings, a head in pieces) is the same bits on all, and is updated, counted and saved by the first.

Rank r of R with S stages is on stage r // (R / S) and takes the share r % (R / S) of the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from finetune.config import TuneConfig, fit_bucket, to_deepspeed
from finetune.data.batches import Microbatch
from finetune.distributed import Grid, random_state, set_random_state
from finetune.engines.base import EngineBase, Reduced
from finetune.engines.diagnosis import first_bad_output, first_on_any_rank, gradient_in_words, output_in_words
from finetune.engines.loss_scale import LossScale
from finetune.engines.pipeline.assignment import assign_stages
from finetune.engines.pipeline.layers import Flow, Layer, LossTally, build_on_meta, give_memory, lent_memory, split
from finetune.engines.pipeline.library import Schedule
from finetune.engines.pipeline.optimizer import StageOptimizer
from finetune.engines.pipeline.schedule import PipeSchedule, StageModule, StepEnd
from finetune.engines.pipeline.shared_weights import SharedWeights
from finetune.engines.pipeline.state import StageState
from finetune.engines.protocol import Fill, StepOutcome
from finetune.model.dtypes import DTYPES
from finetune.model.finite import is_finite
from finetune.model.isolation import positions_of
from finetune.optimizers.kinds import KINDS
from finetune.optimizers.state import groups_of, matrices_of, state_of, whole_state_of

IDLE = "idle"
"""Name of the parameter of a stage that has none of its own to update."""


class PipelineEngine(EngineBase[StageOptimizer]):
    """One stage of a model under DeepSpeed's pipeline on this rank, ZeRO-0 or ZeRO-1 among the ranks of the stage.

    Every method is collective: all ranks call it, in the same order, all ranks of a pipeline with the same batches.
    """

    def __init__(
        self,
        config: TuneConfig,
        hf_config: PretrainedConfig,
        fill: Fill,
        *,
        device: torch.device,
        precision: str,
    ) -> None:
        """Choose the stages, build this rank's, let ``fill(model, gather)`` set its weights, put the pipeline around it.

        Raises:
            ConfigError: the model cannot be split this way.
        """
        super().__init__(device)
        grid = Grid(self.rank, self.world_size // config.pipeline.stages)
        self.stage, self.data_rank, self.data_ranks = grid.stage, grid.data_rank, grid.data_ranks
        self._accumulation, self._clip = config.accumulation, config.optimizer.clip
        self.loss_scale = LossScale() if precision == "fp16" else None
        dtype = DTYPES[precision]
        self.model = build_on_meta(hf_config, dtype)
        self._tally = LossTally(device)
        self.assignment = assign_stages(config, self.model, self._splitting(config), device)
        users = self.assignment.users()
        self._stage_of = {name: users[parameter][0] for name, parameter in self.model.named_parameters()}
        mine = self.assignment.of(self.stage)
        give_memory((parameter for layer in mine for parameter in layer.parameters()), torch.device("cpu"))
        fill(self.model, self.gather)
        self._shared_weights = SharedWeights(users, grid)
        self._module = StageModule(self.assignment.layers, self.assignment.bounds)
        self._schedule, self._optimizer = self._make_optimizer(config, precision)
        if self._optimizer.sums_in_fp32:
            self._shared_weights.add_up_in_fp32()
        name, parameters = config.optimizer.name, dict(self.model.named_parameters())
        state_keys, whole = state_of(self.model, name), whole_state_of(self.model, name)
        self._state = StageState(parameters, self._stage_of, state_keys, whole, self._optimizer, grid, device)
        self._stop = self._diagnose = False
        self._num_targets = 0
        self._shape: tuple[int | bool, ...] | None = None
        self._outcome: StepOutcome | None = None

    def _splitting(self, config: TuneConfig) -> Callable[[int], list[Layer]]:
        return lambda pieces: split(self.model, self.device, self._tally, config.activations, head_pieces=pieces)

    def _make_optimizer(self, config: TuneConfig, precision: str) -> tuple[Schedule, StageOptimizer]:
        """The optimizer of what this stage updates, and DeepSpeed's schedule around both."""
        options = config.optimizer
        named = self.model.named_parameters()
        names = {p: name for name, p in named if self._stage_of[name] == self.stage and p.requires_grad}
        groups = groups_of(self.model, options.name, options.weight_decay, only=set(names.values()))
        if not groups:
            idle = self._module.add_idle_parameter()
            groups, names = [{"params": [idle], "weight_decay": 0.0}], {idle: IDLE}
        inner = KINDS[options.name].make(config, groups, matrices_of(self.model, options.name))
        json = to_deepspeed(config, device=self.device.type, precision=precision, cpu_adam=False, pipeline=True)
        fit_bucket(json, sum(p.numel() for p in names))
        end = StepEnd(
            add_shared_gradients=lambda: self._shared_weights.reduce_gradients(self._optimizer.gradient_of),
            reduce_gradients=self._reduce_gradients,
            update=self._finish_step,
        )
        schedule: Schedule = PipeSchedule(end, self._module, inner, json)
        state_keys = {**state_of(self.model, options.name), IDLE: KINDS[options.name].state}
        return schedule, StageOptimizer(inner, schedule, names, state_keys, self.device)

    def describe(self) -> list[str]:
        """What each stage of the pipeline holds, one line a stage; see ``StageAssignment.describe``."""
        return self.assignment.describe(self._accumulation)

    @contextmanager
    def gather(self, parameters: list[nn.Parameter]) -> Iterator[bool]:
        """Memory for a moment for parameters of other stages: rules for new weights draw the same numbers on every rank."""
        with lent_memory(parameters, torch.device("cpu")):
            yield True

    # -- training

    def train_step(
        self, batches: Sequence[Microbatch], rate: float, *, stop: bool = False, diagnose: bool = False
    ) -> StepOutcome:
        """One optimizer step over this pipeline's micro-batches, normalised by the target tokens of all ranks together."""
        assert len(batches) == self._accumulation, "a step takes exactly the configured number of micro-batches"
        self._optimizer.set_rate(rate)
        counted = sum(batch.num_targets for batch in batches) if self.stage == 0 else 0
        self._num_targets = int(self._sum(float(counted))[0])
        self._stop, self._diagnose, self._outcome = stop, diagnose, None
        self._fit_shapes(batches)
        # DeepSpeed averages over the ranks of a stage; what must remain is the mean over targets, times the loss scale.
        self._tally.start(self._scale * self.data_ranks / max(1, self._num_targets), self._accumulation)
        self._schedule.train_batch(map(_flow, batches))
        assert self._outcome is not None, "DeepSpeed's schedule ends with the optimizer's step"
        if self._outcome.skipped == "loss" and diagnose:
            return replace(self._outcome, diagnosis=self._first_bad_output(batches))
        return self._outcome

    @property
    def _scale(self) -> float:
        """By how much gradients are too large."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def _fit_shapes(self, batches: Sequence[Microbatch]) -> None:
        """Let DeepSpeed tell the next stage new shapes: it does so once, unless told that they change all the time."""
        shapes = {(*batch.inputs.shape, batch.segments is not None) for batch in batches}
        changing = len(shapes) > 1
        shape = None if changing else next(iter(shapes))
        if changing or shape != self._shape:
            self._schedule.reset_activation_shape()
        self._schedule.dynamic_shape, self._shape = changing, shape

    def _reduce_gradients(self) -> None:
        if self._module.idle is not None:
            self._optimizer.add_zeros(self._module.idle)
        self._optimizer.reduce_gradients()

    def _finish_step(self) -> None:
        """Decide on all ranks together whether the step counts, clip, and update."""
        gradients = self._optimizer.reduced_gradients()
        norm = float(torch.stack(torch._foreach_norm(gradients)).double().norm()) / self._scale
        share = 1 / self.data_ranks if self._optimizer.plain else 1.0  # every rank of a stage holds all of its gradient
        found = Reduced(
            loss_sum=float(self._tally.total),
            bad_gradient=not math.isfinite(norm),
            squares=share * norm * norm,
            num_targets=self._num_targets,
            stop=self._stop,
        )
        self._outcome = self._end_step(found, self._first_bad_gradient if self._diagnose else None)

    def _before_update(self, norm: float) -> None:
        self._unscale_and_clip(self._optimizer.reduced_gradients(), norm)

    def _after_update(self) -> None:
        self._shared_weights.renew()

    def _unscale_and_clip(self, gradients: list[torch.Tensor], norm: float) -> None:
        clipped = self._clip / (norm + 1e-6) if self._clip and norm > self._clip else 1.0
        factor = clipped / self._scale  # a power of two: as exact as one after the other
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)

    def _first_bad_output(self, batches: Sequence[Microbatch]) -> str | None:
        """In words, of another forward pass; ``None`` if there is none but the loss itself."""
        state = random_state(self.device)
        mine = first_bad_output(self.model, lambda: self.evaluate(batches), stop=False)
        set_random_state(self.device, state)
        first = first_on_any_rank(mine, self.device, stage=self.stage)
        return None if first is None else output_in_words(self.model, first)

    def _first_bad_gradient(self, skipped: str) -> str | None:
        """In words; ``None`` where ZeRO has cut the gradients up already, and of a loss, which is looked at after the step."""
        if skipped == "loss":
            return None
        named = list(self.model.named_parameters())

        def is_bad(name: str, parameter: nn.Parameter) -> bool:
            own = self._stage_of[name] == self.stage and parameter.requires_grad
            gradient = self._optimizer.gradient_of(parameter) if own else None
            return gradient is not None and not is_finite(gradient)

        bad = torch.tensor([float(is_bad(*each)) for each in named], device=self.device)
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        return gradient_in_words(name for (name, _), flag in zip(named, bad, strict=True) if flag)

    def evaluate(self, batches: Sequence[Microbatch]) -> tuple[float, int]:
        """Sum of the losses and number of targets over all ranks; every pipeline must bring equally many batches."""
        self._fit_shapes(batches)
        self._tally.start(1.0, 1)
        self._schedule.eval_batch(map(_flow, batches), reduce_output=None, bcast_loss=False, num_micro_batches=len(batches))
        counted = sum(batch.num_targets for batch in batches) if self.stage == 0 else 0
        total, count = self._sum(float(self._tally.total), float(counted))
        return total, int(count)

    # -- state, one parameter at a time

    def weights(self, dtype: torch.dtype, *, from_master: bool = False) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every parameter once, whole, on CPU in ``dtype``, on rank 0 alone; ``from_master``: the optimizer's own."""
        return self._state.weights(dtype, from_master=from_master)

    def master_weights(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """What a resumed run needs besides moments: every parameter in fp32, on rank 0 alone."""
        return self._state.weights(torch.float32, from_master=True)

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """``exp_avg.<name>`` and so on of every trained parameter, whole, fp32, on rank 0 alone."""
        return self._state.optimizer_state()

    def set_master_weights(self, read: Callable[[str], torch.Tensor]) -> None:
        """Set the optimizer's fp32 weights from ``read(name)``; those that compute must have been filled with the same."""
        self._state.set_master_weights(read)

    def set_optimizer_state(self, read: Callable[[str], torch.Tensor], optimizer_steps: int) -> None:
        """Set the moments from ``read('exp_avg.<name>')`` and so on, and the number of updates the optimizer has made."""
        self._state.set_optimizer_state(read, optimizer_steps)

    @property
    def optimizer_steps(self) -> int:
        """Updates the optimizer has made: steps taken without the skipped ones."""
        return self._optimizer.updates

    def close(self) -> None:
        """Leave the process group; nothing can be asked of the engine afterwards."""
        self._leave(self._schedule)


def _flow(batch: Microbatch) -> tuple[Flow, torch.Tensor]:
    """What goes into the first stage; what DeepSpeed wants beside it has no use."""
    flow = (batch.inputs, batch.targets)
    return (flow if batch.segments is None else (*flow, positions_of(batch.segments))), batch.targets[:0]
