"""What is made of linear layers and experts as they are read: products, activations behind them, sums over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from serve.model.experts import expert_modules, own_experts
from serve.model.families import Family
from serve.model.filling import ReadExpert
from serve.model.heads import Piece
from serve.model.linear import KernelPacker, Matmul, Packer, Panels, activation_of, plain
from serve.model.packed_experts import Expert, Mix, PackedExperts
from serve.worker.autotp import is_row_parallel
from serve.worker.parallel import Ranks


def activations(model: nn.Module, family: Family) -> dict[nn.Module, tuple[nn.Module, str]]:
    """Linear layers that an activation follows at once: the module it is called from, and the activation's name there."""
    linear, activation = family.activated
    return {
        module: (model.get_submodule(path.rpartition(".")[0]), activation)
        for path, module in model.named_modules()
        if path.endswith("." + linear)
    }


class ProductMaker:
    """What is made of each linear layer as it is read: packed where that is faster, row-parallel products summed.

    A packed layer takes over the activation that follows it; ``None`` where the layer's own ``forward`` is as good.
    """

    def __init__(
        self, packer: Packer | None, ranks: Ranks, model: nn.Module, family: Family, *, whole_experts: bool = False
    ) -> None:
        """``whole_experts``: each rank has some of the experts, not a part of each."""
        self._packer, self._ranks, self._family, self._whole_experts = packer, ranks, family, whole_experts
        self._followed = activations(model, family)
        self._both = _ParallelResidual(ranks) if family.parallel_residual and ranks.size > 1 else None
        self._last = _ending(model, family.row[-1])
        self._experts = frozenset(expert_modules(model, family))
        self._taken_over: dict[nn.Module, str] = {}

    @property
    def copies(self) -> bool:
        """Whether what is made holds nothing of the weight: a packed one is a copy."""
        return self._packer is not None

    def begin(self, shape: tuple[int, int], dtype: torch.dtype, *, later: bool = False) -> Panels | None:
        """A packed weight [O, I] that is to be filled by blocks of rows; ``None`` where it is packed as a whole, or not."""
        return self._packer.begin(shape, dtype, later=later) if isinstance(self._packer, KernelPacker) else None

    def __call__(self, module: nn.Module, weight: Tensor | Panels, bias_O: Tensor | None) -> Matmul | None:
        packer, summed = self._packer, self._ranks.size > 1 and is_row_parallel(module)
        if packer is None and self._ranks.size == 1:
            return None
        activation = self._activation_behind(module) if packer is not None and module in self._followed else "none"
        both = self._both if summed else None
        bias = bias_O if not summed or (both is not None and self._ranks.rank == 0) else None
        if isinstance(weight, Panels):
            assert isinstance(packer, KernelPacker), "it was begun by this one"
            matmul: Matmul = packer.product(weight, bias, activation)
        else:
            matmul = (packer or plain)(weight, bias, activation)
        if both is not None:
            return both.last(matmul) if module in self._last else both.first(matmul)
        return _summed(matmul, bias_O, self._ranks) if summed else matmul

    def experts(self, module: nn.Module, read: ReadExpert) -> Mix | None:
        """What computes a layer's experts, each packed for itself; ``None`` of other modules, and where nothing is packed.

        What the ranks' shares give is summed, and a bias that follows the sum is the first rank's.
        """
        packer = self._packer
        if packer is None or module not in self._experts:
            return None
        left_out = self._family.expert_biases if self._ranks.rank and not self._whole_experts else ()
        own = Piece(0, cast(int, module.num_experts))
        if self._whole_experts:
            own = own_experts(own.width, self._ranks.size, self._ranks.rank)

        def product(stack: str, expert: int) -> tuple[Matmul, int]:
            name = f"{stack}_bias"
            has_bias = module.has_bias and name not in left_out
            bias_O = read(name, expert).clone() if has_bias else None
            weight = read(stack, expert)
            weight_OI = weight.t() if module.is_transposed else weight
            return packer(weight_OI, bias_O), weight_OI.shape[1]

        made = []
        for number in range(own.width):
            (gate_up, hidden), (down, inner) = product("gate_up_proj", number), product("down_proj", number)
            made.append(Expert(gate_up, down, (hidden, inner)))
        gate = cast(Callable[[Tensor], Tensor], module._apply_gate)
        return PackedExperts(made, gate, None if self._ranks.size == 1 else self._ranks.sum_, first=own.begin)

    def _activation_behind(self, module: nn.Module) -> str:
        if module not in self._taken_over:
            parent, name = self._followed[module]
            self._taken_over[module] = activation = activation_of(getattr(parent, name))
            if activation != "none":
                setattr(parent, name, nn.Identity())
        return self._taken_over[module]


def _ending(model: nn.Module, name: str) -> frozenset[nn.Module]:
    """The modules whose path ends so."""
    return frozenset(module for path, module in model.named_modules() if path.endswith("." + name))


class _ParallelResidual:
    """Layers that add their attention and feed-forward part to the same residual: one sum over the ranks for both.

    What a rank's attention gives is kept until its feed-forward part is there, and is zero meanwhile to the layer.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._kept: Tensor | None = None
        self._zero: Tensor | None = None
        """One row, which is all rows that are asked for. Recorded steps read it where it is."""

    def first(self, matmul: Matmul) -> Matmul:
        """The product that ends an attention."""

        def forward(x: Tensor) -> Tensor:
            self._kept = out = matmul(x)
            return self._nothing(out)

        return forward

    def last(self, matmul: Matmul) -> Matmul:
        """The product that ends a feed-forward part."""

        def forward(x: Tensor) -> Tensor:
            kept, self._kept = self._kept, None
            assert kept is not None, "attention comes first in a layer"
            return self._ranks.sum_(matmul(x).add_(kept))

        return forward

    def _nothing(self, like: Tensor) -> Tensor:
        if self._zero is None:
            self._zero = torch.zeros(like.shape[-1], dtype=like.dtype, device=like.device)
        return self._zero.expand(like.shape)


def _summed(matmul: Matmul, bias_O: Tensor | None, ranks: Ranks) -> Matmul:
    def forward(x: Tensor) -> Tensor:
        out = ranks.sum_(matmul(x))
        return out if bias_O is None else out.add_(bias_O)

    return forward
