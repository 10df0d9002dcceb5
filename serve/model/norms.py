"""Norms by the C++ kernel: one call for each, where transformers' definitions take up to eight operations of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn

from serve.model.recording import KINDS, Job, Steps, row_stride

# Shapes.  W features that are normed

ROUNDINGS: Final = ("before weight", "once", "one plus weight")
"""How an RMSNorm is rounded and weighed, in the order of ``Rounding`` in kernels/steps.cpp: normed, rounded and then multiplied
by the weight; rounded once after that; or once after a factor of 1 + weight."""
RMS_ROUNDINGS: Final = {
    **{f"{family}RMSNorm": "before weight" for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Mixtral")},
    **{f"{family}RMSNorm": "once" for family in ("Olmo2", "GptOss")},
    "Gemma2RMSNorm": "one plus weight",
}
"""By class of transformers', how an RMSNorm is rounded and weighed."""


class KernelNorm:
    """A norm's ``forward``. The weights are looked up in each call: they may have been exchanged."""

    __slots__ = ("_epsilon", "_kind", "_plain", "_rounding", "_steps", "_weights")

    def __init__(self, module: nn.Module, steps: Steps, epsilon: float, rounding: str | None) -> None:
        """``rounding``: one of ``ROUNDINGS`` of an RMSNorm, ``None`` of a layer norm."""
        self._plain: Callable[[Tensor], Tensor] = module.forward
        self._weights = module._parameters
        self._steps = steps
        self._epsilon = epsilon
        self._kind = KINDS.index("layer_norm" if rounding is None else "rms_norm")
        self._rounding = 0 if rounding is None else ROUNDINGS.index(rounding)

    def __call__(self, x: Tensor) -> Tensor:
        weight_W, bias_W = self._weights["weight"], self._weights.get("bias")
        assert weight_W is not None, "a norm without a weight keeps its own forward"
        width = weight_W.shape[0]
        stride = row_stride(x, width)
        if stride is None:
            x = x.contiguous()
            stride = width
        if x.dtype is not weight_W.dtype or x.device.type != "cpu":
            return self._plain(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        job = Job(self._kind, x.dtype is torch.bfloat16, x.data_ptr(), None, weight_W.data_ptr(), None)
        job.bias = None if bias_W is None else bias_W.data_ptr()
        job.out, job.rows, job.width, job.x_stride, job.out_stride = out.data_ptr(), x.numel() // width, width, stride, width
        job.activation, job.epsilon = self._rounding, self._epsilon
        self._steps.one(job)
        return out


def compute_norms(model: nn.Module, steps: Steps) -> None:
    """Let the kernel compute every norm of a model that it knows and that has no other ``forward`` already."""
    for module in model.modules():
        if "forward" in module.__dict__:
            continue
        weight = module._parameters.get("weight")
        if weight is None or weight.dtype not in (torch.float32, torch.bfloat16) or weight.dim() != 1:
            continue
        rounding = RMS_ROUNDINGS.get(type(module).__name__)
        if type(module) is nn.LayerNorm or rounding is not None:
            epsilon = getattr(module, "variance_epsilon", None) or module.eps
            module.__dict__["forward"] = KernelNorm(module, steps, float(epsilon), rounding)  # type: ignore[arg-type]  # a number in each
