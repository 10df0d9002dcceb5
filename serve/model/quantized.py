"""Linear layers of whole numbers: weights of 8 or 4 bits with scales, made from a checkpoint's as each of them is read.

Activations stay as they are in fp32, and in bf16 where the processor does not multiply bytes (AVX512-VNNI); only weights are
rounded. A product is the sum of activations times whole numbers, which both routes hold exactly, times the scale: the kernel of
``kernels/quantized.cpp``, or plain torch, which is the reference. Where the processor does, those of bf16 are rounded to 8 bits
as well, in runs of ``RUN`` with a scale each: the kernel of ``kernels/rounded.cpp``.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from serve.model.linear import ACTIVATIONS, Matmul, Packer, plain
from serve.model.recording import KINDS, Job, active

# Shapes.  O output features   I input features   G groups of inputs   P panels of 32 outputs

BITS: Final = {"int8": 8, "int4": 4}
"""Values of ``model.quantization`` that round to whole numbers."""
RUN: Final = 64
"""Neighbouring activations of a token that share a scale where they are rounded; half as many with weights in groups of 32."""
_PANEL: Final = 32
_ROWS_AT_ONCE: Final = 2048
"""Outputs that are rounded in one go: what they take in fp32 bounds the memory beside the weight itself."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight as whole numbers: ``values[o, i] * scales[o, i // group]``."""

    values_OI: Tensor
    """int8; of 4 bits they lie between -8 and 7."""
    scales_OG: Tensor
    """fp32."""
    group: int

    def dequantized(self) -> Tensor:
        """The weight in fp32, as the layer computes with it."""
        inputs = self.values_OI.shape[1]
        scales_OI = self.scales_OG.repeat_interleave(self.group, dim=1)[:, :inputs]
        return self.values_OI.float() * scales_OI


def quantize(weight_OI: Tensor, bits: int, group: int) -> Quantized:
    """Round a weight to whole numbers.

    Of 8 bits each output has one scale, and ``group`` is not looked at. Of 4 bits each group of inputs has one, a shorter last
    group too; the value farthest from 0 becomes -8, so that all sixteen numbers are used.

    A weight of NaN or infinity makes the scale NaN, and with it every output that it would have made so.
    """
    outputs, inputs = weight_OI.shape
    group = inputs if bits == 8 else group
    groups = -(-inputs // group)
    values = torch.empty(outputs, inputs, dtype=torch.int8, device=weight_OI.device)
    scales = torch.empty(outputs, groups, device=weight_OI.device)
    for begin in range(0, outputs, _ROWS_AT_ONCE):
        part = torch.nn.functional.pad(weight_OI[begin : begin + _ROWS_AT_ONCE].float(), (0, groups * group - inputs))
        grouped_OGI = part.view(part.shape[0], groups, group)
        if bits == 8:
            scale_OG = grouped_OGI.abs().amax(dim=2) / 127
        else:
            far = grouped_OGI.abs().argmax(dim=2, keepdim=True)
            scale_OG = grouped_OGI.gather(2, far).squeeze(2) / -8
        scale_OG = torch.where(grouped_OGI.isfinite().all(dim=2), scale_OG, torch.nan)
        safe_OG1 = torch.where(scale_OG == 0, 1.0, scale_OG).nan_to_num(nan=1.0).unsqueeze(2)
        least, most = (-127, 127) if bits == 8 else (-8, 7)
        rounded = (grouped_OGI.nan_to_num(0.0, 0.0, 0.0) / safe_OG1).round().clamp(least, most)
        values[begin : begin + _ROWS_AT_ONCE] = rounded.flatten(1)[:, :inputs].to(torch.int8)
        scales[begin : begin + _ROWS_AT_ONCE] = scale_OG
    return Quantized(values, scales, group)


def quantizing_packer(
    quantization: str, group: int, dtype: torch.dtype, kernels: ctypes.CDLL | None, *, rounds_inputs: bool = True
) -> tuple[str, Packer]:
    """What makes quantized layers for activations of this type on the CPU, and its name in ``ModelFacts.linear``.

    Args:
        quantization: a key of ``BITS``.
        group: inputs that share a scale, of 4 bits; even.
        kernels: as ``load_cpu_kernels`` gives them; ``None`` where there are none.
        rounds_inputs: whether activations are rounded, too, where that is faster: those of bf16 on some processors.
    """
    bits = BITS[quantization]
    routes: list[_Own] = []
    if rounds_inputs and kernels is not None and dtype == torch.bfloat16 and kernels.tessera_linear_rounded_supported():
        routes.append(_Rounded(kernels))
    if kernels is not None and kernels.tessera_linear_quantized_supported(int(dtype == torch.bfloat16)):
        routes.append(_Own(kernels))

    def pack(weight_OI: Tensor, bias_O: Tensor | None, activation: str = "none") -> Matmul:
        weight = quantize(weight_OI, bits, group)
        for route in routes:
            if route.computes(weight, dtype):
                return route.product(weight, bits, dtype, bias_O, activation)
        return reference(weight, bias_O, activation)

    return f"{quantization}-{routes[0].name if routes else 'torch'}", pack


def reference(weight: Quantized, bias_O: Tensor | None, activation: str = "none") -> Matmul:
    """The product in plain torch: the weight is widened to fp32 for every call, the sum rounded to the inputs' type once."""
    bias = None if bias_O is None else bias_O.float()

    def matmul(x: Tensor) -> Tensor:
        return plain(weight.dequantized(), bias, activation)(x.float()).to(x.dtype)

    return matmul


class _Own:
    """The kernel of ``kernels/quantized.cpp``."""

    name = "kernel"
    _kind = KINDS.index("quantized")

    def __init__(self, kernels: ctypes.CDLL) -> None:
        flag, whole, place = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        self._multiply = kernels.tessera_linear_quantized
        self._multiply.argtypes = (flag,) * 3 + (place, whole, whole) + (place,) * 3 + (flag, place) + (whole,) * 3
        self._multiply.restype = None
        self._together = kernels.tessera_linear_quantized_together
        self._together.argtypes = (flag,)

    def computes(self, weight: Quantized, dtype: torch.dtype) -> bool:
        """Whether it takes such a weight and activations of this type."""
        return weight.values_OI.shape[1] % self.together(dtype) == 0

    def together(self, dtype: torch.dtype) -> int:
        """How many inputs lie side by side for activations of this type: a layer has a multiple of it."""
        return int(self._together(int(dtype == torch.bfloat16)))

    def pack(self, values_OI: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
        """Values as the kernel reads them."""
        return packed_values(values_OI, bits, self.together(dtype))

    def product(self, weight: Quantized, bits: int, dtype: torch.dtype, bias_O: Tensor | None, activation: str) -> Matmul:
        """The product with a weight, of which only the packed form is kept."""
        outputs, inputs = weight.values_OI.shape
        group, is_bf16, kind = weight.group + weight.group % 2, int(dtype == torch.bfloat16), ACTIVATIONS.index(activation)
        packed, scales = self.pack(weight.values_OI, bits, dtype), packed_scales(weight.scales_OG)
        multiply, job_kind = self._multiply, self._kind

        def matmul(x: Tensor) -> Tensor:
            assert x.dtype == dtype, "the kernel sees addresses alone"
            rows_MI = x.reshape(-1, inputs)
            if rows_MI.stride(1) != 1:
                rows_MI = rows_MI.contiguous()
            rows = rows_MI.shape[0]
            out_MO = torch.empty(rows, outputs, dtype=dtype)
            multiply(
                is_bf16,
                bits,
                torch.get_num_threads(),
                rows_MI.data_ptr(),
                rows,
                rows_MI.stride(0),
                packed.data_ptr(),
                scales.data_ptr(),
                None if bias_O is None else bias_O.data_ptr(),
                kind,
                out_MO.data_ptr(),
                outputs,
                inputs,
                group,
            )
            if (recorder := active()) is not None:
                job = Job(job_kind, is_bf16, rows_MI.data_ptr(), None, packed.data_ptr(), scales.data_ptr())
                job.bias = None if bias_O is None else bias_O.data_ptr()
                job.out, job.rows, job.width, job.inputs = out_MO.data_ptr(), rows, outputs, inputs
                job.x_stride, job.out_stride, job.activation = rows_MI.stride(0), outputs, kind
                job.bits, job.group = bits, group
                recorder.note(job)
            return out_MO.view(*x.shape[:-1], outputs)

        return matmul


class _Rounded(_Own):
    """The kernel of ``kernels/rounded.cpp``: of bf16 numbers alone, on processors that multiply bytes."""

    name = "vnni"
    _kind = KINDS.index("rounded")
    _QUAD: Final = 4

    def __init__(self, kernels: ctypes.CDLL) -> None:
        super().__init__(kernels)
        self._multiply = kernels.tessera_linear_rounded
        self._multiply.argtypes = kernels.tessera_linear_quantized.argtypes
        self._multiply.restype = None

    def computes(self, weight: Quantized, dtype: torch.dtype) -> bool:
        """Inputs come in fours, and no run of them is of two groups."""
        inputs = weight.values_OI.shape[1]
        return inputs % self._QUAD == 0 and (weight.group >= inputs or weight.group % (RUN // 2) == 0)

    def together(self, dtype: torch.dtype) -> int:
        """How many inputs one product takes."""
        return self._QUAD

    def pack(self, values_OI: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
        """Values as the kernel reads them, none of which is below zero."""
        packed = super().pack(values_OI, bits, dtype)
        return packed if bits == 4 else packed.view(torch.uint8) ^ 128


def packed_values(values_OI: Tensor, bits: int, together: int) -> Tensor:
    """Panels as the kernel reads them, one behind the other; ``together`` inputs lie side by side."""
    outputs, inputs = values_OI.shape
    panels = -(-outputs // _PANEL)
    padded = torch.nn.functional.pad(values_OI, (0, 0, 0, panels * _PANEL - outputs))
    steps = padded.view(panels, _PANEL, inputs // together, together).transpose(1, 2)
    steps = steps.contiguous().view(-1, _PANEL * together)
    if bits == 8:
        return steps
    low, high = (steps + 8).to(torch.uint8).chunk(2, dim=1)
    return (low | high << 4).contiguous()


def packed_scales(scales_OG: Tensor) -> Tensor:
    """Scales as the kernel reads them, of one panel behind the other."""
    outputs, groups = scales_OG.shape
    panels = -(-outputs // _PANEL)
    padded = torch.nn.functional.pad(scales_OG, (0, 0, 0, panels * _PANEL - outputs))
    return padded.view(panels, _PANEL, groups).transpose(1, 2).contiguous()
