"""DeepSpeed's pipeline for ``tessera-finetune pretrain``: stages over transformers' own layers, the state of each in reach.

What always holds: a loss or gradient that is not finite on any rank changes no weight and no moment on any rank; a weight that
several stages use (tied embeddings, a head in pieces) is the same bits on all, and is updated, counted and saved by the first.

Rank r of R with S stages is on stage r // (R / S) and takes the share r % (R / S) of the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

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
from finetune.buckets import reduce_in_place
from finetune.config import TuneConfig, to_deepspeed
from finetune.data.batches import Microbatch
from finetune.diagnosis import gradient_in_words, is_finite
from finetune.errors import ConfigError
from finetune.fragments import Fragments, all_of, ranges_of
from finetune.isolation import positions_of
from finetune.moments import MOMENTS, factors_of, groups_of, matrices_of, moments_of, no_updates, updates_made
from finetune.optimizers import make_optimizer
from finetune.partition import Bounds
from finetune.profile import measure, recall, remember
from finetune.ranks import Peers, Ranked
from finetune.sharded import ShardedOptimizer
from finetune.stages import (
    Flow,
    Layer,
    LossTally,
    build_on_meta,
    give_memory,
    lent_memory,
    num_parameters,
    split,
    type_of,
)
from finetune.types import StepOutcome

IDLE = "idle"
"""Name of the parameter of a stage that has none of its own to update."""
PROFILE = "profile.json"
"""In the run's folder: what the layers were measured to cost."""


class _Stages(PipelineModule):
    """The layers of this rank's stage, by bounds that were chosen before."""

    def __init__(self, layers: Sequence[Layer], bounds: Bounds) -> None:
        self._chosen = bounds  # the constructor below asks for it
        super().__init__(layers=layers, num_stages=len(bounds) - 1, loss_fn=None, partition_method="chosen")

    def _partition_layers(self, method: str = "chosen") -> None:
        self.parts = list(self._chosen)
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def add_idle_parameter(self) -> nn.Parameter:
        """Something to update for the optimizer of a stage that only has copies of others' weights."""
        self.idle = nn.Parameter(torch.zeros(1, dtype=next(self.parameters()).dtype, device=next(self.parameters()).device))
        return self.idle


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
        self._ends._reduce_shared_gradients()

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


@dataclass(slots=True)
class _Shared:
    """A weight that several stages use, on one of them."""

    weight: nn.Parameter
    owned: bool
    """Whether this stage updates it; the others hold copies."""
    owner: int
    """Rank that does, among those with the same share of the data."""
    group: Any
    gradient: torch.Tensor | None = None
    """Of a copy, where DeepSpeed adds up in fp32."""

    def add_gradient(self, weight: torch.Tensor) -> None:
        assert weight.grad is not None, "called once a gradient was accumulated"
        if self.gradient is None:
            self.gradient = torch.zeros_like(weight, dtype=torch.float32)
        self.gradient += weight.grad
        weight.grad = None


class PipelineEngine(Ranked):
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
        super().__init__(device)
        self.stages = config.pipeline.stages
        self.data_ranks = self.world_size // self.stages
        self.stage, self.data_rank = divmod(self.rank, self.data_ranks)
        self._accumulation, self._clip = config.accumulation, config.optimizer.clip
        self._precision = precision
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32

        self.model = build_on_meta(hf_config, dtype)
        self._tally = LossTally(device)
        self._split = partial(split, self.model, device, self._tally, checkpointed=config.pipeline.checkpoint_activations)
        self._layers = self._split()
        self.costs: list[float] | None = None
        self.bounds = self._choose_bounds(config, dtype)
        self._stage_of = self._find_owners()
        mine = self._layers[self.bounds[self.stage] : self.bounds[self.stage + 1]]
        give_memory((parameter for layer in mine for parameter in layer.parameters()), torch.device("cpu"))
        fill(self.model, self.gather)
        self._shared = self._find_shared()
        self._module = _Stages(self._layers, self.bounds)
        # What another stage updates is not ours to update.
        options, owned = config.optimizer, dict(self._owned())
        groups = groups_of(self.model, options.name, options.weight_decay, only=owned)
        groups = groups or [{"params": [self._module.add_idle_parameter()], "weight_decay": 0.0}]
        self._moments = {**moments_of(self.model, options.name), IDLE: MOMENTS[options.name]}
        self._factors = factors_of(self.model, options.name)
        self._inner = make_optimizer(options, groups, matrices_of(self.model, options.name))
        json = to_deepspeed(config, device=device.type, precision=precision, cpu_adam=False, pipeline=True)
        self._schedule = _Schedule(self, self._module, self._inner, json)
        self._wrapper = self._schedule.optimizer
        self._plain = self._wrapper is self._inner
        if not self._plain and precision == "fp32":
            reduce_in_place(self._wrapper)
        self._watch_copies()
        self._fragments = self._find_fragments(owned)
        self._create_moments()
        self._guard_inner_step()
        self._skip_update = self._stop = self._diagnose = False
        self.loss_scale = None
        self._num_targets = 0
        self._shape: tuple[Any, ...] | None = None
        self._outcome: StepOutcome | None = None

    # -- stages

    def _choose_bounds(self, config: TuneConfig, dtype: torch.dtype) -> Bounds:
        method, stages = config.pipeline.partition, self.stages
        if method == "profile":
            self.costs = self._measured_costs(config, dtype)
        layers = self._layers
        if len(layers) < stages:
            raise ConfigError(
                f"pipeline.stages is {stages}; it must be at most {len(layers)}, the layers of this model that can be apart "
                "(embeddings, each block, norm, head)"
            )
        if self.costs is not None:
            return partition.balanced(self.costs, stages)
        if method == "parameters":
            return partition.balanced([num_parameters(layer) for layer in layers], stages)
        if method == "uniform":
            return partition.uniform(len(layers), stages)
        return partition.of_type([type_of(layer) for layer in layers], method.removeprefix("type:"), stages)

    def _measured_costs(self, config: TuneConfig, dtype: torch.dtype) -> list[float]:
        """Seconds of each layer, the head cut into as many pieces as the stages need to be alike."""
        most = min(16, config.batch.micro * config.data.seq_len)  # beyond, each is too small to be computed well
        costs = self._measure(self._layers, config, dtype)
        pieces = partition.head_pieces(costs, self.stages, most=most)
        found = {1: costs}
        while pieces > 1 and pieces <= most:  # a piece costs a little more than its share: look before choosing
            layers = self._split(head_pieces=pieces)
            each, last = self._measure([layers[-pieces], layers[-1]], config, dtype)
            found[pieces] = [*costs[:-1], *[each] * (pieces - 1), last]
            if partition.imbalance(found[pieces], partition.balanced(found[pieces], self.stages)) <= partition.ALIKE:
                break
            pieces *= 2
        pieces = partition.quickest(found, self.stages)
        if pieces > 1:
            self._layers = self._split(head_pieces=pieces)
        return found[pieces]

    def _measure(self, layers: Sequence[Layer], config: TuneConfig, dtype: torch.dtype) -> list[float]:
        """Seconds of each layer, the same numbers on every rank.

        All ranks measure at the same time, since at the same time they will compute, and may share a machine's memory.
        """
        size = {
            "micro": config.batch.micro,
            "seq_len": config.data.seq_len,
            "hidden_size": self.model.config.hidden_size,
            "vocab_size": self.model.config.vocab_size,
        }
        conditions = {
            **size,
            "layers": [layer.signature for layer in layers],
            "checkpoint_activations": config.pipeline.checkpoint_activations,
            "device": self.device.type,
            "dtype": str(dtype),
        }
        file = Path(config.run.output) / PROFILE
        costs = torch.zeros(len(layers), dtype=torch.float64, device=self.device)
        known = recall(file, conditions) if self.rank == 0 and config.run.resume == "auto" else None
        if known is not None:
            costs.copy_(torch.tensor(known, dtype=torch.float64))
        dist.broadcast(costs, src=0)
        if not costs.any():
            seconds = measure(layers, **size, device=self.device, dtype=dtype)
            costs.copy_(torch.tensor(seconds, dtype=torch.float64) / self.world_size)
            dist.all_reduce(costs)
            if self.rank == 0 and file.parent.is_dir():
                remember(file, conditions, costs.tolist())
        return [float(cost) for cost in costs]

    def _stage_layers(self, stage: int) -> list[Layer]:
        return self._layers[self.bounds[stage] : self.bounds[stage + 1]]

    def _find_owners(self) -> dict[str, int]:
        """Parameter name -> the stage that updates and saves it: the first that uses it."""
        stage_of: dict[int, int] = {}
        for stage in range(self.stages):
            for layer in self._stage_layers(stage):
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
            layers = self._stage_layers(stage)
            line = f"stage {stage}: {_summary(layers, self._layers)}; {num_parameters(*layers):,} parameters"
            if self.costs is not None:
                line += f"; {1000 * sum(self.costs[self.bounds[stage] : self.bounds[stage + 1]]):.1f} ms"
            lines.append(line)
        if self.costs is not None and self.stages > 1:
            waiting = (self.stages - 1) / (self._accumulation + self.stages - 1)
            lines.append(
                f"slowest stage: {partition.imbalance(self.costs, self.bounds):.2f} x the mean; "
                f"a step of {self._accumulation} micro-batches waits {waiting:.0%} of its time"
            )
        return lines

    @contextmanager
    def gather(self, parameters: list[nn.Parameter]) -> Iterator[bool]:
        """Memory for a moment for parameters of other stages: rules for new weights draw the same numbers on every rank."""
        with lent_memory(parameters, torch.device("cpu")):
            yield True

    # -- weights of several stages

    def _find_shared(self) -> list[_Shared]:
        """The weights that this stage shares with others, in the same order everywhere."""
        shared = []
        for name, parameter in self.model.named_parameters():
            stages = [
                stage
                for stage in range(self.stages)
                if any(parameter is own for layer in self._stage_layers(stage) for own in layer.parameters())
            ]
            for number in range(self.data_ranks if len(stages) > 1 else 0):
                ranks = [stage * self.data_ranks + number for stage in stages]
                group = dist.new_group(ranks)  # all ranks make all groups
                if self.rank in ranks:
                    shared.append(_Shared(parameter, self._stage_of[name] == self.stage, ranks[0], group))
        return shared

    def _watch_copies(self) -> None:
        """Add up the gradients of copies in fp32, as DeepSpeed does in bf16 for the weights it updates."""
        for shared in self._shared:
            if not shared.owned and self._precision == "bf16":
                shared.weight.register_post_accumulate_grad_hook(shared.add_gradient)

    def _reduce_shared_gradients(self) -> None:
        """Add the gradients of all copies to that of the one that is updated."""
        for shared in self._shared:
            if shared.owned:
                gradient = getattr(shared.weight, "_hp_grad", None) if self._precision == "bf16" else shared.weight.grad
            else:
                gradient = shared.weight.grad if shared.gradient is None else shared.gradient
            assert gradient is not None, "every stage that holds a weight uses it"
            dist.reduce(gradient, dst=shared.owner, group=shared.group)
            if not shared.owned:
                shared.weight.grad = shared.gradient = None

    def _renew_copies(self) -> None:
        for shared in self._shared:
            dist.broadcast(shared.weight.data, src=shared.owner, group=shared.group)

    # -- training

    def train_step(
        self, batches: Sequence[Microbatch], rate: float, *, stop: bool = False, diagnose: bool = False
    ) -> StepOutcome:
        """One optimizer step over this pipeline's micro-batches, normalised by the target tokens of all ranks together."""
        assert len(batches) == self._accumulation, "a step takes exactly the configured number of micro-batches"
        for group in self._inner.param_groups:
            group["lr"] = rate
        counted = sum(batch.num_targets for batch in batches) if self.stage == 0 else 0
        self._num_targets = int(self._sum(float(counted))[0])
        self._stop, self._diagnose, self._outcome = stop, diagnose, None
        self._fit_shapes(batches)
        # DeepSpeed averages over the ranks of a stage; what must remain is the mean over targets.
        self._tally.start(self.data_ranks / max(1, self._num_targets), self._accumulation)
        self._schedule.train_batch(map(_flow, batches))
        assert self._outcome is not None, "DeepSpeed's schedule ends with the optimizer's step"
        return self._outcome

    def _fit_shapes(self, batches: Sequence[Microbatch]) -> None:
        """Let DeepSpeed tell the next stage new shapes: it does so once, unless told that they change all the time."""
        shapes = {(*batch.inputs.shape, batch.segments is not None) for batch in batches}
        changing = len(shapes) > 1
        shape = None if changing else next(iter(shapes))
        if changing or shape != self._shape:
            self._schedule.reset_activation_shape()
        self._schedule.dynamic_shape, self._shape = changing, shape

    def _reduce_gradients(self) -> None:
        """Average over the ranks of this stage."""
        idle = getattr(self._module, "idle", None)
        if idle is not None:
            idle.grad = torch.zeros_like(idle)
            if self._precision == "bf16":
                self._wrapper.update_hp_grads()  # DeepSpeed's norm asks for at least one gradient
        if self._plain:
            gradients = [parameter.grad for parameter in self._updated() if parameter.grad is not None]
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
        loss_sum = float(self._tally.total)
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
        diagnosis = self._first_bad_gradient() if skipped == "gradient" and self._diagnose else None
        self._skip_update = skipped is not None
        self._schedule._take_model_step(None)
        if skipped is None:
            self._renew_copies()
        mean = loss_total / max(1, self._num_targets)
        mean, norm = float("nan") if losses else mean, float("nan") if skipped else norm
        self._outcome = StepOutcome(mean, norm, self._num_targets, skipped, stops > 0, diagnosis)

    def _first_bad_gradient(self) -> str | None:
        """In words; ``None`` where ZeRO has cut the gradients up already."""
        names = [name for name, _ in self.model.named_parameters()]
        owned = dict(self._owned())

        def is_bad(name: str) -> bool:
            own = owned.get(name)
            gradient = getattr(own, "_hp_grad", None)
            gradient = getattr(own, "grad", None) if gradient is None else gradient
            return gradient is not None and not is_finite(gradient)

        bad = torch.tensor([float(is_bad(name)) for name in names], device=self.device)
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        return gradient_in_words(name for name, flag in zip(names, bad, strict=True) if flag)

    def _reduced_gradients(self) -> list[torch.Tensor]:
        """The parts of the reduced gradient that this rank updates with."""
        if self._plain:
            pieces = [parameter.grad for parameter in self._updated() if parameter.grad is not None]
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
        self._tally.start(1.0, 1)
        self._schedule.eval_batch(map(_flow, batches), reduce_output=None, bcast_loss=False, num_micro_batches=len(batches))
        counted = sum(batch.num_targets for batch in batches) if self.stage == 0 else 0
        total, count = self._sum(float(self._tally.total), float(counted))
        return total, int(count)

    # -- state, one parameter at a time

    @torch.no_grad()
    def weights(self, dtype: torch.dtype, *, exact: bool = False) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every parameter once, whole, on CPU in ``dtype``, on rank 0 alone (``None`` elsewhere).

        Args:
            exact: take the optimizer's fp32 weights instead of those that compute.
        """
        for name, parameter in self.model.named_parameters():
            if exact and parameter.requires_grad:
                whole = self._to_first(name, parameter.shape, torch.float32, partial(self._exact, parameter))
            else:
                whole = self._to_first(name, parameter.shape, parameter.dtype, parameter.detach)
            yield name, None if whole is None else whole.to("cpu", dtype)

    @torch.no_grad()
    def masters(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """What a resumed run needs besides moments: every parameter in fp32, on rank 0 alone."""
        return self.weights(torch.float32, exact=True)

    def moments(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """What ``finetune.moments`` lists of every trained parameter (``exp_avg.<name>``), whole, fp32, on rank 0 alone."""
        for name, parameter in self.model.named_parameters():
            for key in self._moments[name] if parameter.requires_grad else ():
                whole = self._to_first(name, parameter.shape, torch.float32, partial(self._moment, parameter, key))
                yield f"{key}.{name}", None if whole is None else whole.to("cpu", torch.float32)
        for factor, (name, size) in self._factors.items():
            whole = self._to_first(name, (size,), torch.float32, partial(self._inner_factors.__getitem__, factor))
            yield factor, None if whole is None else whole.cpu()

    def _to_first(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """What ``read`` gives on the stage that owns ``name``, on rank 0; ``read`` is called by all ranks of that stage."""
        stage = self._stage_of[name]
        whole = read() if stage == self.stage else None
        if stage == 0:
            return whole if self.rank == 0 else None
        sender = stage * self.data_ranks
        if self.rank == sender:
            assert whole is not None, "the sender is on the owning stage"
            dist.send(whole.contiguous(), dst=0)
        elif self.rank == 0:
            whole = torch.empty(tuple(shape), dtype=dtype, device=self.device)
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
            for key in self._moments[name]:
                value = read(f"{key}.{name}").to(self.device)
                if self._plain:
                    self._inner.state[parameter][key].copy_(value)
                else:
                    safe_set_full_optimizer_state(parameter, value, key)
        for factor, whole in self._inner_factors.items():
            whole.copy_(read(factor))
        for tensor in self._updated():
            state = self._inner.state[tensor]
            state["step"] = updates_made(state["step"], adam_steps)

    @property
    def adam_steps(self) -> int:
        """Updates the optimizer has made: steps taken without the skipped ones."""
        return int(self._inner.state[self._updated()[0]]["step"])

    def _updated(self) -> list[torch.Tensor]:
        """The tensors that the optimizer updates on this rank: parameters, or this rank's flat part of them."""
        if self._plain:
            return [parameter for group in self._inner.param_groups for parameter in group["params"]]
        if self._precision == "bf16":
            return list(self._wrapper.fp32_groups_flat_partition)
        return list(self._wrapper.single_partition_of_fp32_groups)

    def _create_moments(self) -> None:
        """Create the moments now, as the optimizer would in its first step, so that they can be saved and set at any time."""
        for tensor, fragments in zip(self._updated(), self._fragments, strict=True):
            keys = self._moments[fragments[0].name]  # all parameters of one flat tensor have the same
            moments = {key: torch.zeros_like(tensor, dtype=torch.float32) for key in keys}
            self._inner.state[tensor] = {"step": no_updates(self._inner, tensor), **moments}
        if not self._plain:
            self._wrapper._lazy_init_hp_params_optimizer_state()
        if isinstance(self._inner, ShardedOptimizer):
            # Without ZeRO every rank of a stage updates all of its weights by itself.
            peers = Peers.alone() if self._plain else Peers.of(self._schedule.mpu.get_data_parallel_group())
            self._inner.place(dict(zip(self._updated(), self._fragments, strict=True)), self.device, peers)

    def _find_fragments(self, owned: Mapping[str, nn.Parameter]) -> list[Fragments]:
        """What lies in each of the tensors that the optimizer updates, in its order."""
        names = {parameter: name for name, parameter in owned.items()}
        if hasattr(self._module, "idle"):
            names[self._module.idle] = IDLE
        if self._plain:
            return [all_of(parameter, names[parameter]) for parameter in self._updated()]  # type: ignore[index]
        return ranges_of(self._wrapper.bf16_groups if self._precision == "bf16" else self._wrapper.bit16_groups, names)

    @property
    def _inner_factors(self) -> dict[str, torch.Tensor]:
        """Of the weights of this stage, what Adafactor keeps whole."""
        return self._inner.whole if isinstance(self._inner, ShardedOptimizer) else {}

    def close(self) -> None:
        """Leave the ranks."""
        self._leave(self._schedule)


def _flow(batch: Microbatch) -> tuple[Flow, torch.Tensor]:
    """What goes into the first stage; what DeepSpeed wants beside it has no use."""
    flow = (batch.inputs, batch.targets)
    return (flow if batch.segments is None else (*flow, positions_of(batch.segments))), batch.targets[:0]


def _summary(layers: Sequence[Layer], whole: Sequence[Layer]) -> str:
    """``embedding, 6 transformer blocks`` and so on; of a head in pieces the share."""
    names = []
    for kind in dict.fromkeys(layer.kind for layer in layers):
        count, total = (sum(layer.kind == kind for layer in some) for some in (layers, whole))
        if kind == "block":
            names.append(f"{count} transformer block{'s' if count > 1 else ''}")
        else:
            names.append(kind if count == total else f"{count}/{total} of the {kind}")
    return ", ".join(names)
