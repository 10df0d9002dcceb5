"""DeepSpeed ZeRO for tuning: stages, offload, and exact access to their state.

What always holds: a loss or gradient that is not finite on any rank changes no weight and no moment on any rank.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from finetune.config import TuneConfig, fit_bucket, to_deepspeed, updates_early
from finetune.data.batches import Microbatch
from finetune.distributed import random_state, set_random_state
from finetune.engines.base import EngineBase, Reduced
from finetune.engines.diagnosis import first_bad_output, first_on_any_rank, gradient_in_words, output_in_words
from finetune.engines.loss_scale import LossScale
from finetune.engines.protocol import Fill, FillAdapters, StepOutcome
from finetune.engines.zero.library import Engine
from finetune.engines.zero.optimizer import ZeroOptimizer, choose_optimizer
from finetune.engines.zero.pinned import pin_offloaded
from finetune.machine.nvme import Disk, disk_settings
from finetune.model.adapters import add_adapters, as_peft_names_them, base_of
from finetune.model.build import build_empty, meta_shapes
from finetune.model.dtypes import DTYPES
from finetune.model.fused_loss import liger_loss
from finetune.model.isolation import forward_inputs
from finetune.model.loss import HeadLoss, check_fused_loss, token_losses
from finetune.model.packed_attention import PackedAttention, is_by_length, varlen_attention
from finetune.model.recompute import recompute_blocks
from finetune.optimizers.state import state_of
from host import heap

_COLLECTIVE_TIMEOUT = timedelta(hours=2)  # rank 0 alone writes checkpoints while the others wait


def start_ranks(device: str, rank: int) -> torch.device:
    """Join the ranks of this run (RANK, WORLD_SIZE and MASTER_* of the environment) and choose this rank's device."""
    # A third of what a micro-batch held would be gaps between tensors, more or less of them from one shape to the next.
    heap.give_back(heap.TENSOR_BYTES)
    # DeepSpeed would build its shared-memory all-reduce here. Only inference ever calls it, so training neither
    # waits for a compiler nor fails without one.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Nothing here is compiled by torch. DeepSpeed's Muon is, as soon as DeepSpeed looks whether the optimizer is that one: a
    # second and 40 MiB for a compiler that is never called.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # DeepSpeed calls collectives by names that torch has deprecated: hundreds of lines that hide a rank's own.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=_COLLECTIVE_TIMEOUT)
    return torch.device(device, rank) if device == "cuda" else torch.device("cpu")


def _packed_attention(
    config: TuneConfig, model: PreTrainedModel, device: torch.device, precision: str
) -> PackedAttention | None:
    """What computes attention of rows that hold several samples; ``None`` where a mask keeps them apart."""
    varlen = varlen_attention()
    if not is_by_length(config.activations.packed_attention, model.config, device.type, precision) or varlen is None:
        return None
    return PackedAttention(model, varlen)


def _head_loss(config: TuneConfig, model: PreTrainedModel, device: torch.device, precision: str) -> HeadLoss | None:
    """The loss in the place of the logits; ``None`` where it is taken from whole ones."""
    activations = config.activations
    if activations.loss == "fused":
        check_fused_loss(device.type, precision, model)
        return HeadLoss(model, fused=liger_loss())
    return HeadLoss(model, activations.loss_rows) if activations.loss_rows != 0 and HeadLoss.supports(model) else None


class ZeroEngine(EngineBase[ZeroOptimizer]):
    """One model under DeepSpeed ZeRO on this rank.

    Every method is collective: all ranks call it, in the same order.
    """

    def __init__(
        self,
        config: TuneConfig,
        hf_config: PretrainedConfig,
        fill: Fill,
        *,
        fill_adapters: FillAdapters | None = None,
        device: torch.device,
        precision: str,
        cpu_adam: bool,
        disk: tuple[Disk, Path] | None = None,
        isolated: bool = False,
    ) -> None:
        """Build the model, let ``fill(model, gather)`` set its weights, and put ZeRO around it.

        With ``config.lora`` adapters are put beside the filled model; ``fill_adapters(model, gather)`` sets theirs. ``disk``,
        and the run's folder on it, are needed when anything is offloaded to NVMe. ``isolated``: rows hold several samples, each
        of which sees itself alone.
        """
        super().__init__(device)
        self.data_rank, self.data_ranks = self.rank, self.world_size
        self._stage, self._updates_early = config.zero.stage, updates_early(config)
        self._accumulation = config.accumulation
        dtype = DTYPES[precision]
        self.loss_scale = LossScale() if precision == "fp16" else None
        settings = None if disk is None else disk_settings(config, *disk, meta_shapes(hf_config), dtype.itemsize)
        elements = sum(map(math.prod, meta_shapes(hf_config).values())) if config.offload.ratio < 1.0 else None
        ds = to_deepspeed(config, device=device.type, precision=precision, cpu_adam=cpu_adam, disk=settings, elements=elements)
        pin_offloaded(config.offload, device)
        partitioned = deepspeed.zero.Init(config_dict_or_path=ds) if self._stage == 3 else nullcontext()
        base = build_empty(hf_config, dtype, partitioned)
        fill(base, self.gather)
        self.model: nn.Module = base
        self._has_adapters = config.lora is not None
        if config.lora is not None:
            # While it lives, peft makes partitioned weights whole where it reads them (DoRA's norms).
            if self._stage == 3:
                self._told_peft = HfDeepSpeedConfig(ds)  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
            self.model = add_adapters(base, config.lora, base=str(config.model.path), seed=config.run.seed)
            if fill_adapters is not None:
                fill_adapters(self.model, self.gather)
        recompute_blocks(base, config.activations.checkpoint, pin_memory=device.type == "cuda")
        self._packed_attention = _packed_attention(config, base, device, precision) if isolated else None
        self._head_loss = _head_loss(config, base, device, precision)
        self._state_keys = state_of(self.model, config.algorithm)
        optimizer = choose_optimizer(config, self.model, cpu_adam=cpu_adam)
        fit_bucket(ds, sum(getattr(parameter, "ds_numel", parameter.numel()) for _, parameter in self._trained()))
        engine, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=ds, dist_init_required=False)
        self._engine: Engine = engine
        names = {parameter: name for name, parameter in self._trained()}
        self._optimizer = ZeroOptimizer(self._engine, config, names, self._state_keys, device=device, rank=self.rank)

    @contextmanager
    def gather(self, parameters: list[nn.Parameter]) -> Iterator[bool]:
        """Whole parameters for a moment, to be written by ranks for which this yields true."""
        if self._stage < 3 or not parameters:
            yield True
            return
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
            yield self.rank == 0

    # -- training

    def train_step(
        self, batches: Sequence[Microbatch], rate: float, *, stop: bool = False, diagnose: bool = False
    ) -> StepOutcome:
        """One optimizer step over this rank's micro-batches, normalised by the target tokens of all ranks together."""
        assert len(batches) == self._accumulation, "a step takes exactly the configured number of micro-batches"
        self._optimizer.begin_step(rate, None if self.loss_scale is None else self.loss_scale.value)
        self._engine.train()
        num_targets = int(self._sum(float(sum(batch.num_targets for batch in batches)))[0])
        loss_sum = torch.zeros((), dtype=torch.float64)
        for number, batch in enumerate(batches):
            loss = self._loss(batch)
            loss_sum += loss.detach().double().cpu()
            if number == 0:
                self._optimizer.release_gradients()
            # DeepSpeed divides by accumulation and by ranks; what must remain is the mean over targets.
            self._engine.backward(loss * (self._accumulation * self.world_size / max(1, num_targets)))
            if number < len(batches) - 1:
                self._engine.step()
        found = Reduced(
            loss_sum=float(loss_sum), bad_gradient=not self._optimizer.gradients_finite(), num_targets=num_targets, stop=stop
        )
        return self._end_step(found, partial(self._diagnose, batches) if diagnose else None)

    def _norm(self, found: float) -> float:
        """DeepSpeed has taken it, and clipped by it, in its own step."""
        return float(self._engine.get_global_grad_norm() or 0.0)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Microbatch]) -> tuple[float, int]:
        """Sum of the losses and number of targets over all ranks; every rank must bring equally many batches."""
        self._engine.eval()
        loss_sum, num_targets = 0.0, 0
        for batch in batches:
            loss_sum += float(self._loss(batch))
            num_targets += batch.num_targets
        total, count = self._sum(loss_sum, float(num_targets))
        return total, int(count)

    def _loss(self, batch: Microbatch) -> torch.Tensor:
        targets = batch.targets.to(self.device)
        if self._head_loss is None:
            return token_losses(self._forward(batch), targets)
        with self._head_loss.of(targets):
            return self._forward(batch)

    def _forward(self, batch: Microbatch) -> torch.Tensor:
        packed = self._packed_attention
        if packed is not None:
            packed.begin(batch.inputs, batch.segments, self.device)
        inputs = forward_inputs(batch, base_of(self.model).config, self.device, masked=packed is None)
        return self._engine(**inputs).logits

    def describe(self) -> list[str]:
        """Which libraries of GPUs take part."""
        found = ["packed samples are kept apart by their lengths, without a mask"] if self._packed_attention else []
        return found + (["the loss is liger-kernel's"] if self._head_loss is not None and self._head_loss.is_fused else [])

    def _diagnose(self, batches: Sequence[Microbatch], skipped: str) -> str | None:
        """Where this step's first value that is not finite came from, the same on every rank."""
        if skipped != "loss":
            trained = self._trained()
            bad = torch.tensor(
                [float(self._optimizer.is_gradient_bad(parameter)) for _, parameter in trained], device=self.device
            )
            dist.all_reduce(bad, dist.ReduceOp.MAX)
            return gradient_in_words(name for (name, _), flag in zip(trained, bad, strict=True) if flag)
        state = random_state(self.device)
        self._engine.eval()
        found = [first_bad_output(self._engine.module, partial(self._loss, batch), stop=False) for batch in batches]
        set_random_state(self.device, state)
        mine = min((f for f in found if f is not None), key=lambda f: f.module, default=None)
        first = first_on_any_rank(mine, self.device)
        return None if first is None else output_in_words(self._engine.module, first)

    # -- state, one parameter at a time

    @torch.no_grad()
    def weights(self, dtype: torch.dtype, *, from_master: bool = False) -> Iterator[tuple[str, torch.Tensor | None]]:
        """What is served: every parameter once, whole, on CPU in ``dtype``, on rank 0 alone (``None`` elsewhere).

        With adapters it is theirs alone, under peft's names.

        Args:
            from_master: take the optimizer's fp32 weights instead of those that compute.
        """
        if not self._has_adapters:
            yield from self._whole(dtype, from_master, list(self.model.named_parameters()))
            return
        adapters = dict(self._whole(dtype, from_master, self._trained()))
        if self.rank == 0:
            found = {name: tensor for name, tensor in adapters.items() if tensor is not None}
            yield from as_peft_names_them(self.model, found).items()

    @torch.no_grad()
    def master_weights(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """What a resumed run needs, by the model's own names, in fp32: trained weights, and frozen ones without adapters."""
        everything = self._trained() if self._has_adapters else list(self.model.named_parameters())
        yield from self._whole(torch.float32, True, everything)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def _whole(
        self, dtype: torch.dtype, from_master: bool, parameters: Sequence[tuple[str, nn.Parameter]]
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name, parameter in parameters:
            if from_master and parameter.requires_grad:
                whole = self._optimizer.master_weight(parameter)
                yield name, whole.to("cpu", dtype) if self.rank == 0 else None
                continue
            gathering = deepspeed.zero.GatheredParameters([parameter]) if self._stage == 3 else nullcontext()
            with gathering:
                yield name, parameter.detach().to("cpu", dtype) if self.rank == 0 else None

    @torch.no_grad()
    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """``exp_avg.<name>`` and so on of every trained parameter, whole, fp32, on rank 0 alone.

        Which keys a parameter has depends on the optimizer: see ``optimizers.state``, and ``Adafactor`` for its factors.
        """
        self._optimizer.settle()
        for name, parameter in self._trained():
            for key in self._state_keys[name]:
                whole = self._optimizer.state_of(parameter, key)
                yield f"{key}.{name}", whole.to("cpu", torch.float32) if self.rank == 0 else None
        for name, whole in self._optimizer.whole_state.items():
            yield name, whole.cpu() if self.rank == 0 else None

    @torch.no_grad()
    def set_master_weights(self, read: Callable[[str], torch.Tensor]) -> None:
        """Set the optimizer's fp32 weights from ``read(name)``; those that compute must have been filled with the same."""
        self._optimizer.settle()
        for name, parameter in self._trained():
            self._optimizer.set_master_weight(parameter, read(name))

    @torch.no_grad()
    def set_optimizer_state(self, read: Callable[[str], torch.Tensor], optimizer_steps: int) -> None:
        """Set the moments from ``read('exp_avg.<name>')`` and so on, and the number of updates the optimizer has made."""
        self._optimizer.settle()
        for name, parameter in self._trained():
            for key in self._state_keys[name]:
                self._optimizer.set_state_of(parameter, key, read(f"{key}.{name}"))
        for name, whole in self._optimizer.whole_state.items():
            whole.copy_(read(name))
        self._optimizer.set_updates(optimizer_steps)

    @property
    def optimizer_steps(self) -> int:
        """Updates the optimizer has made: steps taken without the skipped ones."""
        return self._optimizer.updates

    def close(self) -> None:
        """Leave the process group; nothing can be asked of the engine afterwards."""
        self._optimizer.close()
        self._leave(self._engine)
