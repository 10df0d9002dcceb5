"""Linear layers whose weights are whole numbers, by the Triton kernel of ``linear_kernels``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
from torch import Tensor

from serve.model.cuda.linear_kernels import quantized_linear
from serve.model.cuda.tiling import precision_of
from serve.model.linear import Matmul, Packer
from serve.model.quantized import BITS, Quantized, quantize

# Shapes.  M rows   O output features   I input features   G groups of inputs

PADDED_TO: Final = {8: 64, 4: 64}
"""Inputs, by bits, that a row is padded to a multiple of: of 4 bits a span, a half of which is in the smallest group."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One way to compile ``quantized_linear``."""

    rows: int
    """BM."""
    outputs: int
    """BO."""
    inputs: int
    """K."""
    num_warps: int
    num_stages: int
    spans: int = 1
    """SPANS."""


def linear_shape(dtype: torch.dtype, bits: int, rows: int) -> LinearShape:
    """The shape for so many rows: two in all, so that what is compiled does not depend on the load. None spills a register.

    A product of few rows takes as long as its weight is read. Few outputs of a program make enough programs for all of a GPU,
    and many inputs at once enough bytes under way.
    """
    half = PADDED_TO[4] // 2
    if dtype == torch.float32:
        return LinearShape(16, 32, half, 4, 3)
    if rows <= 16:
        return LinearShape(16, 16, 256, 2, 3) if bits == 8 else LinearShape(16, 16, half, 2, 4, spans=4)
    return LinearShape(64, 64, 64 if bits == 8 else half, 8, 3)


def whole_number_packer(quantization: str, group: int) -> Packer:
    """What makes layers of whole numbers; see ``quantizing_packer``, whose reference they equal but for the order of sums."""
    bits = BITS[quantization]

    def pack(weight_OI: Tensor, bias_O: Tensor | None, activation: str = "none") -> Matmul:
        return _whole_numbers(quantize(weight_OI, bits, group), bits, bias_O, activation)

    return pack


def packed(values_OI: Tensor, bits: int) -> Tensor:
    """A weight's whole numbers as the kernel reads them, rows padded; see ``linear_kernels``."""
    padded = torch.nn.functional.pad(values_OI, (0, -values_OI.shape[1] % PADDED_TO[bits]))
    if bits == 8:
        return padded
    low, high = (padded + 8).to(torch.uint8).view(len(padded), -1, 2, PADDED_TO[bits] // 2).unbind(2)
    return (low | high << 4).flatten(1)


def _whole_numbers(weight: Quantized, bits: int, bias_O: Tensor | None, activation: str) -> Matmul:
    outputs, inputs = weight.values_OI.shape
    numbers, scales_OG = packed(weight.values_OI, bits), weight.scales_OG.contiguous()
    widen = bool(triton.knobs.runtime.interpret)  # which multiplies the bits of bf16 as if they were integers

    def matmul(x: Tensor) -> Tensor:
        rows_MI = x.reshape(-1, inputs)
        if rows_MI.stride(1) != 1:
            rows_MI = rows_MI.contiguous()
        rows = len(rows_MI)
        shape = linear_shape(x.dtype, bits, rows)
        out_MO = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        quantized_linear[(triton.cdiv(outputs, shape.outputs), triton.cdiv(rows, shape.rows))](
            rows_MI,
            numbers,
            scales_OG,
            out_MO if bias_O is None else bias_O,
            out_MO,
            rows,
            inputs,
            outputs,
            rows_MI.stride(0),
            numbers.stride(0),
            scales_OG.shape[1],
            BITS=bits,
            GROUP=weight.group,
            BM=shape.rows,
            BO=shape.outputs,
            K=shape.inputs,
            SPANS=shape.spans,
            BIASED=bias_O is not None,
            KIND=activation,
            PRECISION=precision_of(x.dtype),
            WIDEN=widen,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
        return out_MO.view(*x.shape[:-1], outputs)

    return matmul
