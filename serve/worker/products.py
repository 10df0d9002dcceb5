"""What is made of each linear layer as it is read: its product, with the activation behind it and the sum over the ranks."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

from torch import Tensor, nn

from serve.model.families import Family
from serve.model.linear import Matmul, Packer, activation_of, plain
from serve.worker.parallel import Ranks, is_row_parallel


def activations(model: nn.Module, family: Family) -> dict[nn.Module, tuple[nn.Module, str]]:
    """Linear layers that an activation follows at once: the module it is called from, and the activation's name there."""
    linear, activation = family.activated
    return {
        module: (model.get_submodule(path.rpartition(".")[0]), activation)
        for path, module in model.named_modules()
        if path.endswith("." + linear)
    }


def product_maker(
    packer: Packer | None, ranks: Ranks, followed: dict[nn.Module, tuple[nn.Module, str]]
) -> Callable[[nn.Module, Tensor, Tensor | None], Matmul | None]:
    """What is made of each linear layer as it is read: packed where that is faster, row-parallel products summed.

    A packed layer takes over the activation that follows it; ``None`` where the layer's own ``forward`` is as good.
    """
    taken_over: dict[nn.Module, str] = {}

    def activation_behind(module: nn.Module) -> str:
        if module not in taken_over:
            parent, name = followed[module]
            taken_over[module] = activation = activation_of(getattr(parent, name))
            if activation != "none":
                setattr(parent, name, nn.Identity())
        return taken_over[module]

    def make(module: nn.Module, weight_OI: Tensor, bias_O: Tensor | None) -> Matmul | None:
        summed = ranks.size > 1 and is_row_parallel(module)
        if packer is None and ranks.size == 1:
            return None
        activation = activation_behind(module) if packer is not None and module in followed else "none"
        matmul: Matmul = (packer or plain)(weight_OI, None if summed else bias_O, activation)
        _give_back_freed_memory()
        return _summed(matmul, bias_O, ranks) if summed else matmul

    return make


def _give_back_freed_memory() -> None:
    """Return freed heap pages to the system.

    glibc keeps the plain weights' memory for later and, packed ones lying between, cannot reuse it well: without this a rank's
    peak is a quarter above what it holds.
    """
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _summed(matmul: Matmul, bias_O: Tensor | None, ranks: Ranks) -> Matmul:
    def forward(x: Tensor) -> Tensor:
        out = ranks.sum_(matmul(x))
        return out if bias_O is None else out.add_(bias_O)

    return forward
