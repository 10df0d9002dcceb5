"""What one rank updates, in either engine: the optimizer's state made, counted and set, skipped steps kept out.

No DeepSpeed here; where it keeps the tensors, an engine's own optimizer says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from finetune.distributed import Peers
from finetune.engines.guard import guard_update
from finetune.optimizers.base import ShardedOptimizer
from finetune.optimizers.fragments import Fragments


class EngineOptimizer(ABC):
    """An optimizer with its tensors in reach. Methods that touch tensors are collective among the ranks that share them."""

    def __init__(
        self, updaters: Sequence[torch.optim.Optimizer], state_keys: Mapping[str, tuple[str, ...]], device: torch.device
    ) -> None:
        """Guard the updates of ``updaters``; the first of them holds the state.

        Args:
            state_keys: of each parameter, the keys of what is kept of it; see ``optimizers.kind``.
            device: where the ranks communicate.
        """
        self._updaters, self._inner, self._device = updaters, updaters[0], device
        self._state_keys = state_keys
        self.skip_update = False
        """Whether the next update is to change nothing."""
        for updater in updaters:
            guard_update(updater, lambda: self.skip_update)

    @abstractmethod
    def updated(self) -> Sequence[torch.Tensor]:
        """The fp32 tensors that are updated on this rank."""

    @abstractmethod
    def update(self) -> bool:
        """Update, unless that is to be skipped, and forget the gradients; whether anything was updated."""

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the updates to come, in all groups of parameters."""
        for updater in self._updaters:
            for group in updater.param_groups:
                group["lr"] = rate

    # -- state

    @property
    def updates(self) -> int:
        """Updates made: steps taken without the skipped ones."""
        return int(self._inner.state[self.updated()[0]]["step"])

    def set_updates(self, updates: int) -> None:
        """Set how many updates the optimizer has made, when a run is resumed."""
        for tensor in self.updated():
            state = self._inner.state[tensor]
            counted = state["step"]
            state["step"] = torch.full_like(counted, updates) if isinstance(counted, torch.Tensor) else updates

    @abstractmethod
    def master_weight(self, parameter: nn.Parameter) -> torch.Tensor:
        """A parameter's fp32 weight, which the optimizer updates: whole, gathered from the ranks that share it."""

    @abstractmethod
    def set_master_weight(self, parameter: nn.Parameter, whole: torch.Tensor) -> None:
        """Set a parameter's fp32 weight from all of it."""

    @abstractmethod
    def state_of(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """What is kept of a parameter under ``key``, such as ``exp_avg``, whole."""

    @abstractmethod
    def set_state_of(self, parameter: nn.Parameter, key: str, whole: torch.Tensor) -> None:
        """Set what is kept of a parameter under ``key`` from all of it."""

    @property
    def whole_state(self) -> dict[str, torch.Tensor]:
        """What every rank has all of, by ``<key>.<parameter>``."""
        return self._inner.whole if isinstance(self._inner, ShardedOptimizer) else {}

    def _create_state(self, fragments: Sequence[Fragments], peers: Peers) -> None:
        """Create the state now, as the optimizer would in its first step, so that it can be saved and set at any time.

        Args:
            fragments: what lies in each of the tensors that are updated.
            peers: the ranks that hold the other fragments.
        """
        updated = self.updated()
        for number, (tensor, held) in enumerate(zip(updated, fragments, strict=True)):
            with self._in_memory(number):
                keys = self._state_keys[held[0].name]  # all parameters of one flat tensor have the same
                state = {key: torch.zeros_like(tensor, dtype=torch.float32) for key in keys}
                self._inner.state[tensor] = {"step": self._none_yet(number, tensor), **state}
        self._link_state()
        if isinstance(self._inner, ShardedOptimizer):
            self._inner.place(dict(zip(updated, fragments, strict=True)), self._device, peers)

    @contextmanager
    def _in_memory(self, number: int) -> Iterator[None]:
        """While entered, the state of a tensor that is updated lies in memory."""
        yield

    def _none_yet(self, number: int, tensor: torch.Tensor) -> torch.Tensor | int:
        """The count of a tensor's updates, none yet, as its optimizer keeps it: torch's fused AdamW beside the tensor."""
        fused = isinstance(self._inner, torch.optim.AdamW)
        return torch.zeros((), dtype=torch.float32, device=tensor.device) if fused else 0

    @abstractmethod
    def _link_state(self) -> None:
        """Let DeepSpeed find the state of each parameter in that of the tensors that are updated."""
