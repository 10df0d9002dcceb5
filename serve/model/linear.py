"""Linear layers as the CPU likes them: weights packed once, when they are loaded.

Three routes, the best one that the machine has: our own kernel (AVX-512: few rows at the speed of memory, many about as fast
as oneDNN), oneDNN's packed weights, and plain torch. A packed weight replaces the plain one: no rank holds both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, nn

from serve.model.kernels.build import KernelUnavailable, load_cpu_kernels

# Shapes.  M rows, over all leading dimensions   I input features   O output features

Matmul = Callable[[Tensor], Tensor]
"""x [..., I] -> x @ weight.T [..., O], bias included where the maker was given one."""

Packer = Callable[[Tensor, Tensor | None], Matmul]
"""(weight [O, I], bias [O] or None) -> the product; the plain weight can be dropped afterwards."""


def choose_packer(device: torch.device, dtype: torch.dtype) -> Packer | None:
    """The fastest way to pack weights for this device and type; ``None`` where plain weights are as good."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        kernels = load_cpu_kernels()
    except KernelUnavailable:
        kernels = None
    if kernels is not None and kernels.tessera_linear_supported(dtype == torch.bfloat16):
        return _Own(kernels).pack
    if not torch.backends.mkldnn.is_available():
        return None
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return _pack_onednn


def plain(weight_OI: Tensor, bias_O: Tensor | None) -> Matmul:
    """The product without packing: every device and type."""

    def matmul(x: Tensor) -> Tensor:
        return nn.functional.linear(x, weight_OI, bias_O)

    return matmul


def _pack_onednn(weight_OI: Tensor, bias_O: Tensor | None) -> Matmul:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)

    def matmul(x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias_O, "none", [], "")  # type: ignore[no-any-return]

    return matmul


class _Own:
    """The kernel of ``kernels/linear.cpp``."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._kernels = kernels
        kernels.tessera_linear_packed_numbers.restype = ctypes.c_int64

    def pack(self, weight_OI: Tensor, bias_O: Tensor | None) -> Matmul:
        """Pack a weight; see ``Packer``. A layer with an odd number of inputs goes to oneDNN: bf16 inputs come in pairs."""
        outputs, inputs = weight_OI.shape
        dtype = weight_OI.dtype
        is_bf16 = ctypes.c_int(dtype == torch.bfloat16)
        if dtype == torch.bfloat16 and inputs % 2:
            return _pack_onednn(weight_OI, bias_O)
        size = (ctypes.c_int64(outputs), ctypes.c_int64(inputs))
        plain_OI = weight_OI.contiguous()
        packed = torch.empty(self._kernels.tessera_linear_packed_numbers(*size), dtype=dtype)
        self._kernels.tessera_linear_pack(is_bf16, _threads(), _pointer(plain_OI), _pointer(packed), *size)

        def matmul(x: Tensor) -> Tensor:
            rows_MI = x.reshape(-1, inputs)
            if rows_MI.stride(1) != 1:
                rows_MI = rows_MI.contiguous()
            out_MO = torch.empty(rows_MI.shape[0], outputs, dtype=dtype)
            self._kernels.tessera_linear(
                is_bf16,
                _threads(),
                _pointer(rows_MI),
                ctypes.c_int64(rows_MI.shape[0]),
                ctypes.c_int64(rows_MI.stride(0)),
                _pointer(packed),
                None if bias_O is None else _pointer(bias_O),
                _pointer(out_MO),
                *size,
            )
            return out_MO.view(*x.shape[:-1], outputs)

        return matmul


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _threads() -> ctypes.c_int:
    return ctypes.c_int(torch.get_num_threads())
