"""Weights that several pipeline stages use (tied embeddings, a head in pieces): one stage updates them, the others hold copies.

What always holds between steps: copies are the same bits as the weight that is updated. No DeepSpeed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from finetune.distributed import Grid
from finetune.model.hooks import after_each_gradient


@dataclass(slots=True)
class SharedWeight:
    """A weight that several stages use, on one of them."""

    weight: nn.Parameter
    owner: int
    """Rank that updates it, among those with the same share of the data."""
    owned: bool
    """Whether that is this one; the others hold copies."""
    group: dist.ProcessGroup
    gradient: torch.Tensor | None = None
    """Where the gradients of a copy add up in fp32."""

    def add_gradient(self, weight: torch.Tensor) -> None:
        """Add up in fp32 what a backward pass has left in ``weight.grad``."""
        assert weight.grad is not None, "called once a gradient was accumulated"
        if self.gradient is None:
            self.gradient = torch.zeros_like(weight, dtype=torch.float32)
        self.gradient += weight.grad
        weight.grad = None


class SharedWeights:
    """The weights that this rank's stage shares with others. Every method is collective among all ranks."""

    def __init__(self, users: Mapping[nn.Parameter, Sequence[int]], grid: Grid) -> None:
        """Find them: in the same order everywhere, since all ranks make all groups.

        Args:
            users: the stages of each parameter, the one that updates it first.
        """
        self._shared: list[SharedWeight] = []
        for parameter, stages in users.items():
            for number in range(grid.data_ranks if len(stages) > 1 else 0):
                ranks = [grid.rank_of(stage, number) for stage in stages]
                group: dist.ProcessGroup = dist.new_group(ranks)
                if grid.rank in ranks:
                    self._shared.append(SharedWeight(parameter, ranks[0], grid.rank == ranks[0], group))

    def add_up_in_fp32(self) -> None:
        """Have the gradients of copies add up in fp32 too, as DeepSpeed does for the weights that are updated."""
        for shared in self._shared:
            if not shared.owned:
                after_each_gradient(shared.weight, shared.add_gradient)

    def reduce_gradients(self, gradient_of: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
        """Add the gradients of all copies to that of the weight that is updated, which ``gradient_of`` gives."""
        for shared in self._shared:
            own = shared.weight.grad if shared.gradient is None else shared.gradient
            gradient = gradient_of(shared.weight) if shared.owned else own
            assert gradient is not None, "every stage that holds a weight uses it"
            dist.reduce(gradient, dst=shared.owner, group=shared.group)
            if not shared.owned:
                shared.weight.grad = shared.gradient = None

    def renew(self) -> None:
        """Give all copies the bits of the weight that was updated."""
        for shared in self._shared:
            dist.broadcast(shared.weight.data, src=shared.owner, group=shared.group)
