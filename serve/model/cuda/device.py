"""What computes attention, smaller weights and what stands between products on a CUDA device. Needs no Triton to be asked."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

import torch
from torch import nn

from serve.errors import ConfigError
from serve.model.attention import Backend, TorchBackend
from serve.model.cuda.fp8 import pack_fp8
from serve.model.linear import FUNCTIONS, Packer, activation_of
from serve.model.quantized import quantizing_packer

_KERNELS_NEED: Final = (8, 0)
"""Older devices have no products of bf16, and less shared memory than a tile takes."""
_FP8_NEEDS: Final = (8, 9)

_LOG = logging.getLogger(__name__)


def device_backend(device: torch.device, kept_in: torch.dtype) -> tuple[str, Backend]:
    """The back end of a CUDA device, and its name in ``ModelFacts.attention``: ``triton``, or ``torch`` where that cannot be.

    Args:
        kept_in: what keys and values are kept in.

    Raises:
        ConfigError: keys and values are to be kept in fp8, and the device cannot convert them.
    """
    if kept_in == torch.float8_e4m3fn:
        _require_fp8("cache.kv_cache_dtype", "auto", device)
    if lack := _lack(device):
        _LOG.warning("attention without the Triton kernels, in plain torch, which is slower: %s", lack)
        return "torch", TorchBackend()
    from serve.model.cuda.backend import TritonBackend  # not on the CPU: torch for CUDA brings Triton

    return "triton", TritonBackend(torch.cuda.get_device_properties(device).multi_processor_count)


def device_packer(device: torch.device, quantization: str, group: int, dtype: torch.dtype) -> tuple[str, Packer]:
    """What makes layers of smaller weights on a CUDA device, and its name in ``ModelFacts.linear``.

    Args:
        quantization: a value of ``model.quantization`` but ``none``.
        group: inputs that share a scale, of 4 bits.
        dtype: of activations.

    Raises:
        ConfigError: fp8 on a device that has no products of it, or with activations that they do not give.
    """
    if quantization == "fp8":
        _require_fp8("model.quantization", "int8", device)
        if dtype != torch.bfloat16:
            name = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"model.quantization is fp8; its products are in bfloat16, and model.dtype is {name}: choose that"
            )
        return "fp8", pack_fp8
    if lack := _lack(device):
        _LOG.warning("%s weights without the Triton kernel, in plain torch, which is slower: %s", quantization, lack)
        return quantizing_packer(quantization, group, dtype, None)
    from serve.model.cuda.linear import whole_number_packer  # not on the CPU, as above

    return f"{quantization}-triton", whole_number_packer(quantization, group)


def launch_less(model: nn.Module, *, by_triton: bool) -> None:
    """Let activations take one launch each on a CUDA device, where transformers' take several; and norms, if kernels may, with
    the sums that they are of.

    Args:
        by_triton: whether Triton's kernels compute on that device.
    """
    for module in model.modules():
        activation = activation_of(module)
        if activation != "none":
            module.__dict__["forward"] = FUNCTIONS[activation]
    if by_triton:
        from serve.model.cuda.layers import norm_by_one_launch  # not on the CPU, as above
        from serve.model.cuda.residuals import sum_by_one_launch

        norm_by_one_launch(model)
        sum_by_one_launch(model)


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels compute on a CUDA device."""
    return not _lack(device)


def _require_fp8(field: str, instead: str, device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_NEEDS:
        raise ConfigError(
            f"{field} is fp8; it needs compute capability {_said(_FP8_NEEDS)}, and {device} has {_said(capability)}: "
            f"choose {instead}"
        )


def _lack(device: torch.device) -> str:
    """Why the Triton kernels cannot serve on a device; empty where they can."""
    capability = torch.cuda.get_device_capability(device)
    if capability < _KERNELS_NEED:
        return f"they need compute capability {_said(_KERNELS_NEED)}, and {device} has {_said(capability)}"
    return lack_of_triton()


def lack_of_triton() -> str:
    """Why Triton cannot compile here what launches its kernels, or keep it; empty where it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    given = os.environ.get("CC")
    compilers = ["gcc", "clang"] if given is None else [given]
    if not any(map(shutil.which, compilers)):
        return f"Triton needs a C compiler, and there is no {' or '.join(compilers) or 'name in CC'}; CC may name one"
    headers = sysconfig.get_paths("posix_prefix")["include"]
    if not Path(headers, "Python.h").is_file():
        return f"Triton needs Python's headers, and there is no {headers}/Python.h (apt-get install python3-dev)"
    try:
        tempfile.gettempdir()
    except OSError:
        return "Triton needs a folder for temporary files, and none can be written; TMPDIR may name one"
    from triton import knobs

    folder = Path(knobs.cache.dir)
    remedy = "TRITON_CACHE_DIR may name another folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"Triton keeps its kernels in {folder}, which cannot be made ({error.strerror}); {remedy}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"Triton keeps its kernels in {folder}, which cannot be written; {remedy}"
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return f"Triton keeps its kernels in {folder}, from where no code may run (noexec); {remedy}"
    return ""


def _said(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
