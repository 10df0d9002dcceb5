"""What is saved of a pipeline and set again, one parameter at a time, whichever stage it is on. No DeepSpeed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from finetune.distributed import Grid
from finetune.engines.pipeline.optimizer import StageOptimizer


class StageState:
    """The weights and moments of all stages, by the model's own names. Every method is collective among all ranks."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        stage_of: Mapping[str, int],
        state_keys: Mapping[str, tuple[str, ...]],
        whole: Mapping[str, tuple[str, int]],
        optimizer: StageOptimizer,
        grid: Grid,
        device: torch.device,
    ) -> None:
        """Know where everything is.

        Args:
            parameters: of the whole model, those of other stages without memory.
            stage_of: the stage that updates and saves each.
            state_keys: of each that is trained, and ``whole`` what every rank has all of (``optimizers.state``).
            optimizer: of this stage.
        """
        self._parameters, self._stage_of, self._state_keys, self._whole = parameters, stage_of, state_keys, whole
        self._optimizer, self._grid, self._device = optimizer, grid, device

    @torch.no_grad()
    def weights(self, dtype: torch.dtype, *, from_master: bool) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every parameter once, whole, on CPU in ``dtype``, on rank 0 alone (``None`` elsewhere).

        Args:
            from_master: take the optimizer's fp32 weights instead of those that compute.
        """
        for name, parameter in self._parameters.items():
            if from_master and parameter.requires_grad:
                whole = self._to_first(name, parameter.shape, torch.float32, partial(self._optimizer.master_weight, parameter))
            else:
                whole = self._to_first(name, parameter.shape, parameter.dtype, parameter.detach)
            yield name, None if whole is None else whole.to("cpu", dtype)

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """What ``optimizers.state`` lists of every trained parameter (``exp_avg.<name>``), whole, fp32, on rank 0 alone."""
        for name, parameter in self._parameters.items():
            for key in self._state_keys[name] if parameter.requires_grad else ():
                read = partial(self._optimizer.state_of, parameter, key)
                whole = self._to_first(name, parameter.shape, torch.float32, read)
                yield f"{key}.{name}", None if whole is None else whole.to("cpu", torch.float32)
        for key, (name, size) in self._whole.items():
            whole = self._to_first(name, (size,), torch.float32, partial(self._optimizer.whole_state.__getitem__, key))
            yield key, None if whole is None else whole.cpu()

    @torch.no_grad()
    def set_master_weights(self, read: Callable[[str], torch.Tensor]) -> None:
        """Set the optimizer's fp32 weights from ``read(name)``; those that compute must have been filled with the same."""
        for name, parameter in self._owned():
            self._optimizer.set_master_weight(parameter, read(name))

    @torch.no_grad()
    def set_optimizer_state(self, read: Callable[[str], torch.Tensor], updates: int) -> None:
        """Set the moments from ``read('exp_avg.<name>')`` and so on, and the number of updates the optimizer has made."""
        for name, parameter in self._owned():
            for key in self._state_keys[name]:
                self._optimizer.set_state_of(parameter, key, read(f"{key}.{name}"))
        for key, whole in self._optimizer.whole_state.items():
            whole.copy_(read(key))
        self._optimizer.set_updates(updates)

    def _owned(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._parameters.items():
            if self._stage_of[name] == self._grid.stage and parameter.requires_grad:
                yield name, parameter

    def _to_first(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """What ``read`` gives on the stage that owns ``name``, on rank 0; ``read`` is called by all ranks of that stage."""
        stage, rank = self._stage_of[name], self._grid.rank
        whole = read() if stage == self._grid.stage else None
        if stage == 0:
            return whole if rank == 0 else None
        sender = self._grid.rank_of(stage)
        if rank == sender:
            assert whole is not None, "the sender is on the owning stage"
            dist.send(whole.contiguous(), dst=0)
        elif rank == 0:
            whole = torch.empty(tuple(shape), dtype=dtype, device=self._device)
            dist.recv(whole, src=sender)
            return whole
        return None
