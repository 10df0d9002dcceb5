"""What stands between a layer's products, by as few launches as can be: a launch takes a GPU longer than most of its work.

Shapes.  W features that are normed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn

from serve.model.cuda.norm_kernels import rms_norm
from serve.model.cuda.tiling import power_of_two
from serve.model.norms import RMS_ROUNDINGS
from serve.model.recording import row_stride

_NUMBERS_OF_A_WARP: Final = 512


def warps_for(padded: int) -> int:
    """Warps of the program that norms so many features, W2."""
    return min(16, max(1, padded // _NUMBERS_OF_A_WARP))


class TritonNorm:
    """An RMSNorm's ``forward`` by one launch. The weight is looked up in each call: it may have been exchanged."""

    __slots__ = ("_epsilon", "_plain", "_rounding", "_weights")

    def __init__(self, module: nn.Module, epsilon: float, rounding: str) -> None:
        """``rounding``: one of ``serve.model.norms.ROUNDINGS``."""
        self._plain: Callable[[Tensor], Tensor] = module.forward
        self._weights = module._parameters
        self._epsilon = epsilon
        self._rounding = rounding

    def __call__(self, x: Tensor) -> Tensor:
        weight_W = self._weights["weight"]
        assert weight_W is not None, "every RMSNorm has a weight"
        if x.dtype is not weight_W.dtype:
            return self._plain(x)
        width = weight_W.shape[0]
        stride = row_stride(x, width)
        if stride is None:
            x = x.contiguous()
            stride = width
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        padded = power_of_two(width)
        rms_norm[(x.numel() // width,)](
            x,
            weight_W,
            out,
            stride,
            self._epsilon,
            W=width,
            W2=padded,
            ROUNDING=self._rounding,
            num_warps=warps_for(padded),
        )
        return out


def norm_by_one_launch(model: nn.Module) -> None:
    """Let the kernel compute every RMSNorm of a model that it knows and that has no other ``forward`` already.

    A layer norm is one launch of torch's already.
    """
    for module in model.modules():
        rounding = RMS_ROUNDINGS.get(type(module).__name__)
        if rounding is not None and "forward" not in module.__dict__:
            epsilon = getattr(module, "variance_epsilon", None) or module.eps
            module.__dict__["forward"] = TritonNorm(module, float(epsilon), rounding)  # type: ignore[arg-type]  # a number in each
