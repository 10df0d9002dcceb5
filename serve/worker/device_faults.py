"""Failures of a rank's device, in a sentence: out of memory, with what would fit; a device that broke; a lost exchange."""

from __future__ import annotations

import errno
import math
import re
from typing import Final

import torch

from serve.config import ServerConfig
from serve.engine.plan import StepPlan
from serve.model.cuda.memory import is_out_of_device_memory
from serve.worker.kv_cache import GIB
from serve.worker.vitals import LastWords

_TRIED: Final = re.compile(r"Tried to allocate ([\d.]+) (GiB|MiB|KiB|bytes)")
_UNITS: Final = {"GiB": GIB, "MiB": 1 << 20, "KiB": 1 << 10, "bytes": 1}
_DEVICE: Final = re.compile(r"CUDA error|cudaError|CUBLAS_STATUS_|CUDNN_STATUS_|Triton Error \[CUDA\]")
_EXCHANGE: Final = re.compile(r"\bNCCL\b|ncclSystemError|ncclRemoteError|ncclInternalError|ProcessGroupNCCL")
_GLOO: Final = "third_party/gloo"
"""Where torch says that an error of the exchange on a CPU came from; it has no type of its own."""
_NO_MEMORY: Final = "can't allocate memory"
"""What torch says of the machine's memory, in an error of no type of its own."""
_TO_SPARE: Final = 1.25
"""A cache is made smaller by so many times what was missing: other steps may take a little more."""


def step_fault(
    error: BaseException, device: str, plan: StepPlan, config: ServerConfig, *, num_blocks: int, block_bytes: int
) -> LastWords | None:
    """What a rank says of a step that failed by its device, before it ends; ``None`` where something else failed.

    Args:
        device: the device's name, asked for while it was well.
        num_blocks: KV blocks of the rank.
        block_bytes: what each of them takes of the device.
    """
    tokens, sequences = sum(span.count for span in plan.spans), len(plan.spans)
    doing = f"in a step of {tokens} tokens of {sequences} sequences"
    if is_out_of_device_memory(error):
        missing = _missing_bytes(error)
        fits = _what_fits(config, tokens, sequences, num_blocks, block_bytes, missing)
        asked = f", for want of {missing / GIB:.2f} GiB" if missing else ""
        return LastWords("memory", f"{_whose_memory(error, device)} ran out of memory {doing}{asked}: {fits}")
    return fault(error, device, doing)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what caused it, says that there was no memory: the device's, or the machine's."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or is_out_of_device_memory(cause):
            return True
        if isinstance(cause, OSError) and cause.errno == errno.ENOMEM:
            return True
        if isinstance(cause, RuntimeError) and _NO_MEMORY in str(cause):
            return True
        cause = cause.__cause__
    return False


def is_of_an_exchange(error: BaseException) -> bool:
    """Whether an exchange with other ranks failed: one of them may have ended, which is why."""
    said = str(error)
    return isinstance(error, torch.distributed.DistError) or _GLOO in said or _EXCHANGE.search(said) is not None


def fault(error: BaseException, device: str, doing: str) -> LastWords | None:
    """What of an error is to be said of the device: nothing where it did not fail, nor the exchange between devices.

    Args:
        doing: what the rank was at, to be read behind the device's name.
    """
    said = str(error)
    first = said.strip().partition("\n")[0][:500]
    if is_out_of_device_memory(error):
        return LastWords("memory", f"{_whose_memory(error, device)} ran out of memory {doing}: {first}")
    if is_of_an_exchange(error):  # before what follows: such an error may quote one of the device
        return LastWords("exchange", f"the exchange with other ranks failed {doing}: {first}")
    if isinstance(error, torch.AcceleratorError) or _DEVICE.search(said):
        return LastWords("device", f"{device} failed {doing}: {first}")
    return None


def weights_that_do_not_fit(config: ServerConfig, device: str, *, weight_bytes: int, free_bytes: int, itemsize: int) -> str:
    """What is said of weights that a device has no room for, with what would fit.

    Args:
        weight_bytes: of all ranks together, as the checkpoint is to be computed with.
        free_bytes: of the device, before the first weight came.
        itemsize: bytes of one weight.
    """
    now, stages = config.model.num_ranks, config.model.pipeline_parallel_size
    needed = math.ceil(weight_bytes / (config.cache.memory_fraction * max(1, free_bytes)) / stages)
    size = max(config.model.tensor_parallel_size + 1, needed)
    ways = [f"--tensor-parallel-size {size} leaves each rank {weight_bytes / (size * stages) / GIB:.1f} GiB of them"]
    if config.model.quantization == "none":
        ways += [f"--quantization {name} takes about {share / itemsize:.0%}" for name, share in (("int8", 1.1), ("int4", 0.6))]
    return (
        f"the weights take {weight_bytes / now / GIB:.1f} GiB on each of {now} ranks, and {device} had "
        f"{free_bytes / GIB:.1f} GiB free: {'; '.join(ways)}"
    )


def _whose_memory(error: BaseException, device: str) -> str:
    """The driver says the same of a device's memory and of the host's, which it pins; torch's allocator has the device's."""
    return device if isinstance(error, torch.OutOfMemoryError) else f"{device}, or the host for what it pins,"


def _missing_bytes(error: BaseException) -> int:
    """What the allocation that failed asked for; 0 where the error does not tell."""
    found = _TRIED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def _what_fits(config: ServerConfig, tokens: int, sequences: int, num_blocks: int, block_bytes: int, missing: int) -> str:
    ways = []
    kept = num_blocks - math.ceil(_TO_SPARE * missing / block_bytes)
    if missing and kept > 0:
        positions = kept * config.cache.block_tokens
        ways.append(
            f"--kv-cache-gib {kept * block_bytes / GIB:.3g} leaves room for it, with {kept} blocks ({positions} positions) of "
            f"now {num_blocks}"
        )
    if tokens > sequences:
        ways.append(f"--max-step-tokens {max(sequences, tokens // 2)} makes such a step half as large")
    elif sequences > 1:
        ways.append(f"--max-num-seqs {sequences // 2} makes such a step half as large")
    if config.cache.kv_cache_gib is None:
        ways.append(f"a --memory-fraction below {config.cache.memory_fraction:g} leaves more to steps")
    elif not missing:
        ways.append(f"a --kv-cache-gib below {config.cache.kv_cache_gib:g} leaves more to the driver and its libraries")
    return "; ".join(ways) or "another model or device is needed"
