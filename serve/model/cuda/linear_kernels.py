"""Triton kernel of a linear layer whose weight is whole numbers of 8 or 4 bits with scales, widened in registers.

Shapes.  M rows   I inputs   O outputs   BM, BO rows and outputs of a program   K inputs of a product   SPAN inputs, two halves

Of 8 bits a weight is int8 [O, I padded], of 4 bits uint8 [O, padded / 2]: byte j of a span of inputs holds input j in its low
half and input SPAN / 2 + j in its high one, 8 more than their numbers. What pads a row counts for nothing: no input is there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _activated(x, KIND: tl.constexpr):
    """One of ``serve.model.linear.ACTIVATIONS``, of fp32."""
    if KIND == "relu":
        x = tl.where(x < 0, 0.0, x)  # NaN stays NaN
    elif KIND == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
    return x


@triton.jit
def _inputs(x, row, first, stride, rows, inputs, K: tl.constexpr, WIDEN: tl.constexpr):
    """Activations [BM, K] from input ``first`` on."""
    i = first + tl.arange(0, K)
    found = tl.load(x + row[:, None] * stride + i[None, :], mask=(row < rows)[:, None] & (i < inputs)[None, :], other=0.0)
    return found.to(tl.float32) if WIDEN else found


@triton.jit(do_not_specialize=["rows"])
def quantized_linear(
    x, weight, scales, bias, out, rows, inputs, outputs, x_row, weight_row, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, K: tl.constexpr, SPANS: tl.constexpr,
    BIASED: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid (parts of O, parts of M): out [M, O] = activation(x [M, I] @ (numbers * scales).T + bias), summed in fp32.

    Args:
        scales: fp32 [O, groups]; of 4 bits one for each GROUP inputs, a multiple of K; of 8 bits one for each output.
        x_row: elements from a row of ``x`` to the next; ``weight_row``: bytes of a row of ``weight``.
        K: of 4 bits half a span.
        SPANS: that are read at once, of 4 bits: a span alone is too little to ask a GPU's memory for.
    """
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    row = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    k = tl.arange(0, K)
    inside = o < outputs
    place = weight + o.to(tl.int64)[None, :] * weight_row
    total = tl.zeros([BM, BO], tl.float32)
    if BITS == 8:
        for first in range(0, inputs, K):
            part = _inputs(x, row, first, x_row, rows, inputs, K, WIDEN)
            there = inside[None, :] & (first + k < weight_row)[:, None]
            numbers = tl.load(place + (first + k)[:, None], mask=there, other=0)
            total += tl.dot(part, numbers.to(part.dtype), input_precision=PRECISION)
        total *= tl.load(scales + o * groups, mask=inside, other=0.0)[None, :]
    else:
        for first in range(0, inputs, 2 * K * SPANS):
            for span in tl.static_range(SPANS):
                low = first + 2 * K * span
                byte = low // 2 + k
                both = tl.load(place + byte[:, None], mask=inside[None, :] & (byte < weight_row)[:, None], other=0)
                part = _inputs(x, row, low, x_row, rows, inputs, K, WIDEN)
                sums = tl.dot(part, ((both & 15).to(tl.int8) - 8).to(part.dtype), input_precision=PRECISION)
                there = inside & (low < inputs)
                total += sums * tl.load(scales + o * groups + low // GROUP, mask=there, other=0.0)[None, :]
                high = low + K
                part = _inputs(x, row, high, x_row, rows, inputs, K, WIDEN)
                sums = tl.dot(part, ((both >> 4).to(tl.int8) - 8).to(part.dtype), input_precision=PRECISION)
                there = inside & (high < inputs)
                total += sums * tl.load(scales + o * groups + high // GROUP, mask=there, other=0.0)[None, :]
    if BIASED:
        total += tl.load(bias + o, mask=inside, other=0.0).to(tl.float32)[None, :]
    total = _activated(total, KIND)
    kept = (row < rows)[:, None] & inside[None, :]
    tl.store(out + row[:, None] * outputs + o[None, :], total.to(out.dtype.element_ty), mask=kept)
