"""What optimizers have in common that treat matrices as matrices, although ZeRO gives each rank a flat piece of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from finetune.distributed import Peers
from finetune.optimizers.fragments import Fragments


class ShardedOptimizer(torch.optim.Optimizer, ABC):
    """Updates ZeRO's flat tensors and speaks with the other ranks on the way, so all of them step together.

    A flat tensor holds either matrices alone or none, see ``optimizers.state``. DeepSpeed may hand over all of them in one
    step or one after the other; the order is the same on every rank. State that has an element for each weight lies in
    ``state[flat]``, flat as the weights are; what a matrix has besides lies in ``whole``.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], defaults: dict[str, Any], *, matrices: frozenset[str]) -> None:
        super().__init__(groups, {"weight_decay": 0.0, **defaults})
        self.whole: dict[str, torch.Tensor] = {}
        """``<key>.<parameter>`` -> state that is whole and equal on all peers; filled by ``place``."""
        self._matrices = matrices
        self._layout: Mapping[torch.Tensor, Fragments] = {}
        self._device = torch.device("cpu")
        self._peers = Peers.alone()

    def place(self, layout: Mapping[torch.Tensor, Fragments], device: torch.device, peers: Peers) -> None:
        """Learn, before the first step, what lies in each tensor that is updated. All peers call it.

        Args:
            device: where ranks communicate; the tensors may lie elsewhere.
            peers: the ranks that hold the other fragments.
        """
        self._layout, self._device, self._peers = layout, device, peers

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch's other form gives back a loss
        """One update of every flat tensor in ``param_groups``. All peers call it."""
        assert closure is None, "DeepSpeed calls it without one"
        for group in self.param_groups:
            for flat in group["params"]:
                assert flat.grad is not None, "a rank without a gradient would leave the others waiting"
                self.state[flat]["step"] += 1
                update = self._update_matrices if self._holds_matrices(self._layout[flat]) else self._update_others
                update(group, flat, self.state[flat], self._layout[flat])

    def _sum_over_peers(self, mine: torch.Tensor) -> torch.Tensor:
        """``mine`` of all peers added up, in new memory where ``mine`` lies."""
        everyone = mine.to(self._device, copy=True)
        self._peers.add_up(everyone)
        return everyone.to(mine.device)

    def _holds_matrices(self, fragments: Fragments) -> bool:
        return fragments[0].name in self._matrices

    @abstractmethod
    def _update_matrices(
        self, group: Mapping[str, Any], flat: torch.Tensor, state: dict[str, Any], fragments: Fragments
    ) -> None:
        """Update one flat tensor of matrices."""

    @abstractmethod
    def _update_others(self, group: Mapping[str, Any], flat: torch.Tensor, state: dict[str, Any], fragments: Fragments) -> None:
        """Update one flat tensor without any."""
