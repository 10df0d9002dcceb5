"""Triton kernel of RMSNorm (Zhang and Sennrich 2019): one launch, where transformers' definitions take seven of torch's.

Shapes.  W features that are normed   W2 the least power of two that is no less
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x, weight, out, x_row, epsilon,
    W: tl.constexpr, W2: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): out [rows, W] = x / sqrt(mean of squares + epsilon), weighed; summed in fp32.

    Args:
        x_row: elements from a row of ``x`` to the next.
        ROUNDING: one of ``serve.model.norms.ROUNDINGS``: where the result is rounded to the type of ``x``, and what weighs it.
    """
    row = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, W2)
    there = w < W
    wide = tl.load(x + row * x_row + w, mask=there, other=0.0).to(tl.float32)
    factor = tl.load(weight + w, mask=there, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / W + epsilon)
    if ROUNDING == "before weight":
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    if ROUNDING == "one plus weight":
        factor += 1.0
    tl.store(out + row * W + w, (normed * factor).to(out.dtype.element_ty), mask=there)
