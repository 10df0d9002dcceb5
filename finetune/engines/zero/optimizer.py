"""The optimizer of one model under ZeRO on this rank, with what DeepSpeed puts around it: its tensors in reach."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import nn

from finetune.config import TuneConfig
from finetune.distributed import Peers
from finetune.engines.buckets import reduce_in_place
from finetune.engines.guard import guard_update
from finetune.engines.zero.library import Zero
from finetune.model.finite import is_finite
from finetune.optimizers.base import ShardedOptimizer
from finetune.optimizers.fragments import Partitioned, fragments_of
from finetune.optimizers.make import make_optimizer
from finetune.optimizers.state import groups_of, matrices_of, no_updates, updates_made
from finetune.optimizers.zenflow import ZenFlow


class ZeroOptimizer:
    """What one rank updates. Methods that touch tensors are collective."""

    def __init__(
        self,
        zero: Zero,
        config: TuneConfig,
        names: Mapping[nn.Parameter, str],
        moments: Mapping[str, tuple[str, ...]],
        *,
        device: torch.device,
        rank: int,
    ) -> None:
        """Reach into ``zero``, what DeepSpeed made around an optimizer of ``choose_optimizer``, and create its moments.

        Args:
            names: of all trained parameters.
            moments: keys of the state of each, see ``finetune.optimizers.state``.
        """
        self._zero, self._moments, self._device, self._rank = zero, moments, device, rank
        self._stage = config.zero.stage
        if self._stage < 3:
            reduce_in_place(zero)
        self._inner = zero.optimizer
        self._updaters: list[torch.optim.Optimizer] = [self._inner]
        if config.offload.ratio < 1.0:
            # DeepSpeed updates what stays on the device with an optimizer of its own, which neither follows the schedule nor
            # is saved. With one state and one guard for both, it is.
            zero.backup_optimizer.state = self._inner.state
            self._updaters.append(zero.backup_optimizer)
        self._zenflow = self._inner if isinstance(self._inner, ZenFlow) else None
        self._offloaded = config.offload.optimizer != "none"
        self._on_disk = config.offload.optimizer == "nvme"
        self.skip_update = False
        """Whether the next update is to change nothing."""
        for updater in self._updaters:
            guard_update(updater, lambda: self.skip_update)
        self._fragments = fragments_of(zero, names, stage=self._stage, rank=rank)
        self._create_moments()

    # -- a step

    def begin_step(self, rate: float, loss_scale: float | None) -> None:
        """Set the learning rate, and in fp16 what the loss will be multiplied by."""
        for updater in self._updaters:
            for group in updater.param_groups:
                group["lr"] = rate
        if loss_scale is not None:
            self._zero.override_loss_scale(loss_scale)

    def release_gradients(self) -> None:
        """Wait until those of the last step may be overwritten."""
        if self._zenflow is not None:
            self._zenflow.release_gradients()

    def gradients_finite(self) -> bool:
        """Whether this rank's part of the reduced gradient is finite. Asked before DeepSpeed steps."""
        pieces = list(self._reduced_gradients())
        assert pieces, "DeepSpeed keeps its reduced gradients elsewhere than this release was written for"
        return all(is_finite(piece) for piece in pieces)

    def is_gradient_bad(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's whole gradient is not finite."""
        if self._on_disk:
            return not math.isfinite(float(self._zero.norm_for_param_grads.get(self._zero.get_param_id(parameter), 0.0)))
        gradient = safe_get_full_grad(parameter)
        return gradient is not None and not is_finite(gradient)

    def forget_history(self) -> None:
        """Let CPU Adam compute its bias corrections from the step number alone.

        It multiplies them up from one step to the next, so after a resume they would differ in the last bit. A call with
        other betas, on a tensor nobody owns, makes the next call start over.
        """
        if isinstance(self._inner, DeepSpeedCPUAdam):
            group = self._inner.param_groups[0]
            one = [torch.zeros(1) for _ in range(4)]
            other = [(1.0 + beta) / 2 for beta in group["betas"]]
            self._inner.ds_opt_adam.adam_update(self._inner.opt_id, 1, 0.0, *other, 1.0, 0.0, True, *one)

    @property
    def overflowed(self) -> bool:
        """Whether DeepSpeed has made no update in its last step."""
        return bool(self._zero.overflow)

    def _reduced_gradients(self) -> Iterator[torch.Tensor]:
        if self._on_disk:
            # The gradients are files by now; the norm of each, taken on the way there, is finite as long as they are.
            yield torch.tensor([float(norm) for norm in self._zero.norm_for_param_grads.values()])
            return
        if self._offloaded:
            yield from (flat.grad for flat in self.flat_weights() if flat.grad is not None)
            return
        for pieces in self._zero.averaged_gradients.values():
            yield from pieces or ()

    # -- state

    @property
    def updates(self) -> int:
        """Updates made: steps taken without the skipped ones."""
        return int(self._inner.state[self.flat_weights()[0]]["step"])

    def set_updates(self, updates: int) -> None:
        """Set their number."""
        for flat in self.flat_weights():
            state = self._inner.state[flat]
            state["step"] = updates_made(state["step"], updates)

    def settle(self) -> None:
        """Bring the state to where it is read and set."""
        if self._zenflow is not None:
            self._zenflow.settle()

    def master_weight(self, parameter: nn.Parameter) -> torch.Tensor:
        """A parameter's fp32 weight, whole."""
        whole: torch.Tensor = safe_get_full_fp32_param(parameter)
        return whole

    def set_exact(self, parameter: nn.Parameter, whole: torch.Tensor) -> None:
        """Set it."""
        if self._stage < 3:
            safe_set_full_fp32_param(parameter, whole.to(self._device))
        else:
            safe_set_local_fp32_param(parameter, self._part(parameter, whole))

    def moment(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """One of a parameter's moments, whole."""
        whole: torch.Tensor = safe_get_full_optimizer_state(parameter, key)
        return whole

    def set_moment(self, parameter: nn.Parameter, key: str, whole: torch.Tensor) -> None:
        """Set it."""
        if self._stage < 3:
            safe_set_full_optimizer_state(parameter, whole.to(self._device), key)
        else:
            safe_set_local_optimizer_state(parameter, self._part(parameter, whole), key)

    @property
    def whole(self) -> dict[str, torch.Tensor]:
        """State that every rank has all of, by key and parameter."""
        return self._inner.whole if isinstance(self._inner, ShardedOptimizer) else {}

    def _part(self, parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part. ZeRO-3 pads each parameter to equal parts; the padding is zero."""
        size = cast(Partitioned, parameter).ds_tensor.numel()
        part = torch.zeros(size, dtype=torch.float32)
        mine = whole.flatten()[self._rank * size : (self._rank + 1) * size]
        part[: mine.numel()] = mine
        return part

    def flat_weights(self) -> Sequence[torch.Tensor]:
        """This rank's fp32 weights as the optimizer holds them, one flat tensor per group."""
        flats = self._zero.fp32_partitioned_groups_flat if self._stage == 3 else self._zero.single_partition_of_fp32_groups
        return list(flats)

    def _create_moments(self) -> None:
        """Create the moments now, as the optimizer would in its first step, so that they can be saved and set at any time."""
        flats = self.flat_weights()
        for number, flat in enumerate(flats):
            here = len(self._updaters) > 1 and self._zero.subgroup_to_device[number] != "cpu"
            # DeepSpeed's optimizer for what stays on the device is torch's AdamW, not fused: it counts on the host.
            none_yet = torch.tensor(0.0) if here else no_updates(self._inner, flat)
            swapped = self._on_disk and self._zero._swappable_optimizer_subgroup(number)
            if swapped:
                self._zero._optimizer_states_and_gradient_swap_in(number)
            keys = self._moments[self._fragments[number][0].name]  # all parameters of one flat tensor have the same
            moments = {key: torch.zeros_like(flat, dtype=torch.float32) for key in keys}
            self._inner.state[flat] = {"step": none_yet, **moments}
            if swapped:
                self._zero._optimizer_states_and_gradient_swap_out(number)
        if self._stage < 3:
            self._zero._lazy_init_hp_params_optimizer_state()
        if isinstance(self._inner, ShardedOptimizer):
            self._inner.place(dict(zip(flats, self._fragments, strict=True)), self._device, Peers.of())

    def close(self) -> None:
        """End what is done in the background."""
        if self._zenflow is not None:
            self._zenflow.close()


def choose_optimizer(config: TuneConfig, model: nn.Module, *, cpu_adam: bool) -> torch.optim.Optimizer:
    """The optimizer of ``model``: DeepSpeed's CPU Adam where AdamW is offloaded and it was built."""
    options, algorithm = config.optimizer, config.algorithm
    groups, matrices = groups_of(model, algorithm, options.weight_decay), matrices_of(model, algorithm)
    betas = (options.betas[0], options.betas[1])
    if algorithm == "zenflow":
        assert options.lr is not None, "the learning rate is settled before anything is built"
        paces = config.offload.zenflow
        return ZenFlow(
            groups,
            matrices=matrices,
            lr=options.lr,
            betas=betas,
            eps=options.eps,
            share=paces.share,
            update_every=paces.update_every,
            select_every=paces.select_every,
        )
    if algorithm == "adamw" and config.offload.optimizer != "none" and cpu_adam:
        optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(
            groups, lr=options.lr, betas=betas, eps=options.eps, adamw_mode=True
        )
        return optimizer
    return make_optimizer(options, groups, matrices)
