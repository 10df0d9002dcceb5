"""What computes a rank's layers and its attention, and which of its steps are captured."""

from __future__ import annotations

import ctypes
import logging
from typing import Final, cast

import torch
from transformers import PreTrainedModel

from serve.config import ServerConfig
from serve.errors import ConfigError
from serve.model.attention import Backend, TorchBackend
from serve.model.cuda.device import device_backend, device_packer, has_kernels, launch_less
from serve.model.cuda.graphs import graph_sizes
from serve.model.cuda.static import StaticTorchBackend
from serve.model.experts import stacked_experts
from serve.model.families import Family
from serve.model.kernel_attention import CpuKernelBackend
from serve.model.kernels.build import load_cpu_kernels
from serve.model.kernels.compiler import KernelUnavailable
from serve.model.linear import Packer, choose_packer
from serve.model.norms import compute_norms
from serve.model.quantized import quantizing_packer
from serve.model.recording import Steps
from serve.types import LengthRule
from serve.worker.parallel import Ranks

_LOG = logging.getLogger(__name__)

_MOST_RECORDED: Final = 32
"""Sequences of the largest step that is recorded on the CPU."""


def choose_linear(
    config: ServerConfig, device: torch.device, dtype: torch.dtype, kernels: ctypes.CDLL | None, *, captured: bool
) -> tuple[str, Packer | None]:
    """What makes a model's linear layers, and its name in ``ModelFacts.linear``. ``captured``: see ``captures_on_cpu``."""
    model = config.model
    if model.quantization != "none" and device.type == "cuda":
        return device_packer(device, model.quantization, model.quantization_group, dtype)
    if model.quantization != "none":
        return quantizing_packer(model.quantization, model.quantization_group, dtype, kernels)
    compressed = config.kernels.compress_weights
    return ("torch", None) if captured else choose_packer(device, dtype, kernels, compressed=compressed)


def choose_attention(
    device: torch.device, kernels: ctypes.CDLL | None, kept_in: torch.dtype, *, captured: bool
) -> tuple[str, Backend]:
    """What computes attention on this device, and its name in ``ModelFacts.attention``. ``kept_in``: of keys and values."""
    if captured:
        return "torch", StaticTorchBackend()
    if kernels is not None:
        return "kernel", CpuKernelBackend(kernels)
    if device.type == "cuda":
        return device_backend(device, kept_in)
    return "torch", TorchBackend()


def compute_between_products(model: PreTrainedModel, device: torch.device, kernels: ctypes.CDLL | None) -> None:
    """Let kernels compute a model's norms, and on a GPU its activations by one launch each."""
    if kernels is not None:
        compute_norms(model, Steps(kernels))
    elif device.type == "cuda":
        launch_less(model, by_triton=has_kernels(device))


def captures_on_cpu(config: ServerConfig, device: torch.device) -> bool:
    """Whether decoding is captured on the CPU, as it is on a GPU: then all is computed by plain torch, which a capture sees."""
    return config.kernels.cuda_graphs == "on" and device.type == "cpu"


def sizes_to_capture(
    config: ServerConfig,
    family: Family,
    rule: LengthRule | None,
    model: PreTrainedModel,
    device: torch.device,
    attention: str,
    ranks: Ranks,
) -> tuple[int, ...]:
    """Rows of the decoding steps that are captured, ascending; none where ``kernels.cuda_graphs`` leaves them out.

    The same on every rank: on a device none, where a step of one of them cannot be captured, for want of a compiler on its
    machine, by its GPU, or by its share of the experts.

    Raises:
        ConfigError: they are asked for and cannot be captured.
    """
    wanted = config.kernels.cuda_graphs
    if device.type == "cpu" and wanted != "on":
        return _sizes_to_record(config, rule, attention)
    if wanted == "off" or (wanted == "auto" and device.type != "cuda"):
        return ()
    why = _obstacle(family, rule, model, device, attention)
    if config.model.pipeline_parallel_size > 1:
        why = "stages wait for one another in every step"
    if not ranks.smallest(int(not why)):
        why = why or "another rank cannot capture its own, and its line in the log says why"
    if why and wanted == "on":
        _LOG.warning("decoding steps cannot be captured: %s", why)  # another rank's answer may be the one that is told
        raise ConfigError(f"kernels.cuda_graphs is on; {why}: choose auto, or off")
    if why:
        _LOG.info("decoding steps are not captured: %s", why)
        return ()
    return graph_sizes(min(config.scheduler.max_num_seqs, config.kernels.cuda_graph_max_batch))


def _sizes_to_record(config: ServerConfig, rule: LengthRule | None, attention: str) -> tuple[int, ...]:
    """Rows of the decoding steps that are recorded where kernels compute on the CPU, ascending.

    Every number up to ``_MOST_RECORDED``; with more, Python's part of a step is small.
    """
    angles_come_from_host = rule is not None and rule.each_length
    if (
        not config.kernels.record_steps
        or attention != "kernel"
        or angles_come_from_host
        or config.model.pipeline_parallel_size > 1
    ):
        return ()
    return tuple(range(1, min(config.scheduler.max_num_seqs, _MOST_RECORDED) + 1))


_GROUPS: Final = (9, 10)
"""Compute capability, its first number, of devices on which torch has grouped products that the host does not wait for."""


def _obstacle(family: Family, rule: LengthRule | None, model: PreTrainedModel, device: torch.device, attention: str) -> str:
    """Why steps cannot be captured; empty where they can."""
    if device.type == "cuda" and attention != "triton":
        return "attention in plain torch reads lengths on the host"
    if rule is not None and rule.each_length:
        return "its angles follow each length, by numbers that come from the host in every step"
    if not family.experts:
        return ""
    if not stacked_experts(model, family):
        return "the host counts the rows of each of its experts, whose weights are quantized one by one"
    if model.config._experts_implementation == "eager":
        return "its experts, whose rows are no whole number of 16 bytes on a rank, are computed one after the other"
    if device.type == "cuda" and model.dtype != torch.bfloat16:
        return f"experts in {model.dtype} are computed one after the other; in bfloat16 they are not"
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in _GROUPS:
        return "its experts are computed one after the other on a device of another compute capability than 9 and 10"
    if any(cast(int, module.num_experts) == 1 for module in stacked_experts(model, family)):  # a histogram without a range
        return "the host counts the rows of an expert that is the only one of its rank"
    return ""


def load_kernels(cache_dir: str, rank: int, device: torch.device, dtype: torch.dtype) -> ctypes.CDLL | None:
    """The CPU kernels where they apply and can be had; else rank 0 says why not, for all."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        return load_cpu_kernels(cache_dir)
    except KernelUnavailable as reason:
        if rank == 0:
            _LOG.warning("serving without the CPU kernels, in plain torch, which is slower: %s", reason)
        return None
