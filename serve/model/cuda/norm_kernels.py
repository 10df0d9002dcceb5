"""Triton kernels of norms, alone and of a sum: one launch, where transformers' definitions take up to nine of torch's.

RMSNorm is that of Zhang and Sennrich (2019).

Shapes.  W features that are normed   W2 the least power of two that is no less
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normed(wide, weight, bias, w, there, epsilon, dtype: tl.constexpr, W: tl.constexpr, ROUNDING: tl.constexpr):
    """A row [W2] in fp32, normed and weighed.

    Args:
        bias: of a layer norm, else anything.
        ROUNDING: one of ``serve.model.norms.ROUNDINGS`` of an RMSNorm, or ``layer`` of a layer norm.
    """
    factor = tl.load(weight + w, mask=there, other=0.0).to(tl.float32)
    if ROUNDING == "layer":
        wide = tl.where(there, wide - tl.sum(wide, 0) / W, 0.0)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / W + epsilon)
    if ROUNDING == "before weight":
        normed = normed.to(dtype).to(tl.float32)
    if ROUNDING == "one plus weight":
        factor += 1.0
    normed = normed * factor
    if ROUNDING == "layer":
        normed += tl.load(bias + w, mask=there, other=0.0).to(tl.float32)
    return normed.to(dtype)


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
    normed = _normed(wide, weight, weight, w, there, epsilon, out.dtype.element_ty, W, ROUNDING)
    tl.store(out + row * W + w, normed, mask=there)


@triton.jit
def sum_and_norm(
    x, y, z, out, weight, bias, normed, other_weight, other_bias, other_normed, x_row, y_row, z_row, epsilon,
    W: tl.constexpr, W2: tl.constexpr, THREE: tl.constexpr, NORMS: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): out [rows, W] = x + y, or x + y + z, each sum rounded; and one norm of that, or two.

    Args:
        z: read where ``THREE`` is set.
        normed, other_normed: [rows, W], what the norms give; the second is written where ``NORMS`` is 2.
        x_row, y_row, z_row: elements from a row to the next.
        ROUNDING: see ``_normed``.
    """
    row = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, W2)
    there = w < W
    total = tl.load(x + row * x_row + w, mask=there, other=0.0).to(tl.float32)
    total += tl.load(y + row * y_row + w, mask=there, other=0.0).to(tl.float32)
    if THREE:
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total += tl.load(z + row * z_row + w, mask=there, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + row * W + w, rounded, mask=there)
    wide = rounded.to(tl.float32)
    first = _normed(wide, weight, bias, w, there, epsilon, out.dtype.element_ty, W, ROUNDING)
    tl.store(normed + row * W + w, first, mask=there)
    if NORMS == 2:
        second = _normed(wide, other_weight, other_bias, w, there, epsilon, out.dtype.element_ty, W, ROUNDING)
        tl.store(other_normed + row * W + w, second, mask=there)
