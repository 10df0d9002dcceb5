"""Linear layers in fp8 (e4m3) by torch's own products: weights are rounded as they are read, activations as they come."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from serve.model.attention import narrowed
from serve.model.linear import FUNCTIONS, Matmul, plain

# Shapes.  M rows   O output features   I input features

_MULTIPLE: Final = 16
"""Rows, inputs and outputs of torch's fp8 products are multiples of it."""
_LARGEST: Final = torch.finfo(torch.float8_e4m3fn).max


def pack_fp8(weight_OI: Tensor, bias_O: Tensor | None, activation: str = "none") -> Matmul:
    """A product in fp8, for activations in bf16; see ``Packer``.

    Each output of the weight has a scale, and so has each row of activations. Where inputs or outputs are no multiple of 16 the
    weight stays as it is. A weight or an activation of NaN or infinity makes NaN of what it is part of.
    """
    outputs, inputs = weight_OI.shape
    if outputs % _MULTIPLE or inputs % _MULTIPLE:
        return plain(weight_OI, bias_O, activation)
    numbers_OI, scale_O1 = _scaled(weight_OI.contiguous())  # whose transposed form is what torch takes
    activate = FUNCTIONS[activation]

    def matmul(x: Tensor) -> Tensor:
        rows_MI = x.reshape(-1, inputs)
        rows = len(rows_MI)
        numbers_MI, scale_M1 = _scaled(torch.nn.functional.pad(rows_MI, (0, 0, 0, -rows % _MULTIPLE)))
        out_MO = torch._scaled_mm(numbers_MI, numbers_OI.t(), scale_M1, scale_O1.t(), bias=bias_O, out_dtype=torch.bfloat16)
        return activate(out_MO[:rows]).view(*x.shape[:-1], outputs)

    return matmul


def _scaled(x_MI: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in fp8, the largest number of each at the end of its range, and fp32 [M, 1], what each is multiplied by."""
    wide_MI = x_MI.float()
    scale_M1 = wide_MI.abs().amax(dim=1, keepdim=True) / _LARGEST
    scale_M1 = torch.where((scale_M1 == 0) | ~scale_M1.isfinite(), 1.0, scale_M1)
    return narrowed(wide_MI / scale_M1), scale_M1
