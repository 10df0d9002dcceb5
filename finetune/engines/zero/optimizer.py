"""The optimizer of one model under ZeRO on this rank, with what DeepSpeed puts around it: its tensors in reach."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from finetune.engines.buckets import make_bucket_late, reduce_in_place
from finetune.engines.optimizer import EngineOptimizer
from finetune.engines.zero.library import Engine
from finetune.model.finite import is_finite
from finetune.optimizers.algorithms.zenflow import ZenFlow
from finetune.optimizers.fragments import Partitioned, fragments_of
from finetune.optimizers.kind import betas_of, rate_of
from finetune.optimizers.kinds import KINDS
from finetune.optimizers.state import groups_of, matrices_of


class ZeroOptimizer(EngineOptimizer):
    """The optimizer of a whole model, of which this rank updates a part. Methods that touch tensors are collective."""

    def __init__(
        self,
        engine: Engine,
        config: TuneConfig,
        names: Mapping[nn.Parameter, str],
        state_keys: Mapping[str, tuple[str, ...]],
        *,
        device: torch.device,
        rank: int,
    ) -> None:
        """Reach into what ``engine`` has made around an optimizer of ``choose_optimizer``, and create its state.

        Args:
            names: of all trained parameters.
            state_keys: of each, see ``optimizers.kind``.
        """
        zero = engine.optimizer
        self._engine, self._zero, self._rank, self._stage = engine, zero, rank, config.zero.stage
        if self._stage < 3:
            reduce_in_place(zero)
        if self._stage == 1:
            make_bucket_late(zero)
        updaters = [zero.optimizer]
        if config.offload.ratio < 1.0:
            # DeepSpeed updates what stays on the device with an optimizer of its own, which neither follows the schedule nor
            # is saved. With one state and one guard for both, it is.
            zero.backup_optimizer.state = zero.optimizer.state
            updaters.append(zero.backup_optimizer)
        super().__init__(updaters, state_keys, device)
        self._zenflow = self._inner if isinstance(self._inner, ZenFlow) else None
        self._offloaded = config.offload.optimizer != "none"
        self._on_disk = config.offload.optimizer == "nvme"
        self._create_state(fragments_of(zero, names, stage=self._stage, rank=rank), Peers.of())

    # -- a step

    def begin_step(self, rate: float, loss_scale: float | None) -> None:
        """Set the learning rate, and in fp16 what the loss will be multiplied by."""
        self.set_rate(rate)
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

    def update(self) -> bool:
        """Step as DeepSpeed does; it refuses by itself where every number is finite and the sum of their squares is not."""
        self.forget_history()
        self._engine.step()
        return not (self.skip_update or bool(self._zero.overflow))

    def _reduced_gradients(self) -> Iterator[torch.Tensor]:
        if self._on_disk:
            # The gradients are files by now; the norm of each, taken on the way there, is finite as long as they are.
            yield torch.tensor([float(norm) for norm in self._zero.norm_for_param_grads.values()])
            return
        if self._offloaded:
            yield from (flat.grad for flat in self.updated() if flat.grad is not None)
            return
        for pieces in self._zero.averaged_gradients.values():
            yield from pieces or ()

    # -- state

    def settle(self) -> None:
        """Bring the state to where it is read and set."""
        if self._zenflow is not None:
            self._zenflow.settle()

    def master_weight(self, parameter: nn.Parameter) -> torch.Tensor:
        """A parameter's fp32 weight, which the optimizer updates: whole, gathered from the ranks that share it."""
        whole: torch.Tensor = safe_get_full_fp32_param(parameter)
        return whole

    def set_master_weight(self, parameter: nn.Parameter, whole: torch.Tensor) -> None:
        """Set a parameter's fp32 weight from all of it."""
        if self._stage < 3:
            safe_set_full_fp32_param(parameter, whole.to(self._device))
        else:
            safe_set_local_fp32_param(parameter, self._part(parameter, whole))

    def state_of(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """What is kept of a parameter under ``key``, whole."""
        whole: torch.Tensor = safe_get_full_optimizer_state(parameter, key)
        return whole

    def set_state_of(self, parameter: nn.Parameter, key: str, whole: torch.Tensor) -> None:
        """Set what is kept of a parameter under ``key`` from all of it."""
        if self._stage < 3:
            safe_set_full_optimizer_state(parameter, whole.to(self._device), key)
        else:
            safe_set_local_optimizer_state(parameter, self._part(parameter, whole), key)

    def _part(self, parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part. ZeRO-3 pads each parameter to equal parts; the padding is zero."""
        size = cast(Partitioned, parameter).ds_tensor.numel()
        part = torch.zeros(size, dtype=torch.float32)
        mine = whole.flatten()[self._rank * size : (self._rank + 1) * size]
        part[: mine.numel()] = mine
        return part

    def updated(self) -> Sequence[torch.Tensor]:
        """This rank's fp32 weights as the optimizer holds them, one flat tensor per group."""
        flats = self._zero.fp32_partitioned_groups_flat if self._stage == 3 else self._zero.single_partition_of_fp32_groups
        return list(flats)

    @contextmanager
    def _in_memory(self, number: int) -> Iterator[None]:
        swapped = self._on_disk and self._zero._swappable_optimizer_subgroup(number)
        if swapped:
            self._zero._optimizer_states_and_gradient_swap_in(number)
        yield
        if swapped:
            self._zero._optimizer_states_and_gradient_swap_out(number)

    def _none_yet(self, number: int, tensor: torch.Tensor) -> torch.Tensor | int:
        here = len(self._updaters) > 1 and self._zero.subgroup_to_device[number] != "cpu"
        # DeepSpeed's optimizer for what stays on the device is torch's AdamW, not fused: it counts on the host.
        return torch.tensor(0.0) if here else super()._none_yet(number, tensor)

    def _link_state(self) -> None:
        if self._stage < 3:
            self._zero._lazy_init_hp_params_optimizer_state()

    def close(self) -> None:
        """End what is done in the background."""
        if self._zenflow is not None:
            self._zenflow.close()


def choose_optimizer(config: TuneConfig, model: nn.Module, *, cpu_adam: bool) -> torch.optim.Optimizer:
    """The optimizer of ``model``: DeepSpeed's CPU Adam where AdamW is offloaded and it was built.

    Raises:
        ConfigError: it treats matrices in its own way, and is to be kept on disks.
    """
    algorithm, options = config.algorithm, config.optimizer
    config.check_disks(by_matrix=KINDS[algorithm].matrix_state is not None)
    groups, matrices = groups_of(model, algorithm, options.weight_decay), matrices_of(model, algorithm)
    if algorithm == "adamw" and config.offload.optimizer != "none" and cpu_adam:
        optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(
            groups, lr=rate_of(config), betas=betas_of(config), eps=options.eps, adamw_mode=True
        )
        return optimizer
    return KINDS[algorithm].make(config, groups, matrices)
