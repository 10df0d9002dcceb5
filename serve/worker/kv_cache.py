"""The KV blocks' memory on one rank: every layer's keys and values, and how many blocks fit."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from host import limits
from serve.config import CacheConfig, SchedulerConfig
from serve.errors import ConfigError
from serve.model.attention import LayerCache

_LOG = logging.getLogger(__name__)

GIB = 1 << 30
LIBRARIES_BYTES = GIB // 2
"""What a GPU's context and libraries take of it in each process."""
_CPU_SHARE = 0.25
_CPU_MOST_BYTES = 4 * GIB
_SCALES = torch.bfloat16


def cache_dtype(wanted: str, device: str, dtype: torch.dtype) -> torch.dtype:
    """What keys and values are kept in, by ``cache.kv_cache_dtype``; ``dtype`` is the model's.

    Raises:
        ConfigError: nothing computes with them on this device.
    """
    if wanted == "fp8" and device == "cpu":
        raise ConfigError("cache.kv_cache_dtype is fp8; it is for GPUs, and model.device is cpu: choose auto, or int8")
    if wanted == "int8" and device != "cpu":
        raise ConfigError(f"cache.kv_cache_dtype is int8; it is for the CPU, and model.device is {device}: choose auto")
    if wanted == "fp8" and dtype == torch.float32:  # whose products, of what is widened in registers, spill them
        raise ConfigError(
            "cache.kv_cache_dtype is fp8; it is for models in bfloat16 or float16, and this one computes in float32: "
            "choose auto, or another model.dtype"
        )
    return {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(wanted, dtype)


def block_bytes(*, layers: int, kv_heads: int, head_dim: int, block_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one block in all layers of this rank, keys and values; of int8 with their scales."""
    scale = _SCALES.itemsize if dtype == torch.int8 else 0
    return 2 * layers * kv_heads * block_tokens * (head_dim * dtype.itemsize + scale)


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """What one rank may take for its blocks."""

    num_bytes: int
    why: str
    """Where the number comes from, in words."""

    def __str__(self) -> str:
        return f"{self.num_bytes / GIB:.2f} GiB a rank, {self.why}"


def choose_memory(
    cache: CacheConfig, device: torch.device, local_ranks: int, *, promised_bytes: int = 0, steps_bytes: int = 0
) -> CacheMemory:
    """How much memory this rank's blocks may take.

    ``cache.kv_cache_gib`` decides where it is given. Else, on a GPU, what ``cache.memory_fraction`` of it, or what others leave
    of it, has room for beside the rank's weights, its libraries and its steps. On the CPU it is a quarter
    of the free memory shared by the local ranks, at most 4 GiB each. Free is what the container's limits leave, too.

    Args:
        promised_bytes: what each local rank will take on the CPU beside what is taken already.
        steps_bytes: what the largest step and all captured ones take of a GPU beside weights and blocks.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
        # Graphs take of the driver's memory, too, and each tensor is rounded up: where others have most of it as where not.
        left = min(int(cache.memory_fraction * total) - own, free) - LIBRARIES_BYTES - steps_bytes
        where = (
            f"{_gib(free)} free on the device, {_gib(own)} taken, {_gib(steps_bytes)} kept for steps and "
            f"{_gib(LIBRARIES_BYTES)} for libraries"
        )
    else:
        free = max(0, limits.memory_available() - promised_bytes * local_ranks)
        left = min(_CPU_MOST_BYTES, int(free * _CPU_SHARE / local_ranks))
        limit = limits.memory_limit()
        where = f"{_gib(free)} free" + (f" of the container's limit of {_gib(limit)}" if limit is not None else "")
    if cache.kv_cache_gib is not None:
        wanted = int(cache.kv_cache_gib * GIB)
        if wanted * (local_ranks if device.type == "cpu" else 1) > free:
            _LOG.warning("cache.kv_cache_gib is %g, which is more than there is: %s", cache.kv_cache_gib, where)
        return CacheMemory(wanted, f"cache.kv_cache_gib ({where})")
    if device.type == "cuda":
        return CacheMemory(left, f"what cache.memory_fraction {cache.memory_fraction:g} leaves ({where})")
    return CacheMemory(
        left, f"a quarter of what is free for {local_ranks} ranks, at most {_gib(_CPU_MOST_BYTES)} each ({where})"
    )


def choose_num_blocks(
    memory: CacheMemory, *, cache: CacheConfig, scheduler: SchedulerConfig, max_model_len: int, bytes_per_block: int
) -> int:
    """How many blocks this rank can hold: never more than all sequences at full length could use.

    Raises:
        ConfigError: not even one block fits.
    """
    useful = scheduler.max_num_seqs * -(-max_model_len // cache.block_tokens)
    blocks = min(useful, memory.num_bytes // bytes_per_block)
    if blocks < 1:
        block = f"one block of {cache.block_tokens} positions takes {bytes_per_block} bytes"
        raise ConfigError(f"cache.kv_cache_gib: {block}, and there is less: {memory}")
    return int(blocks)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def allocate(
    *,
    layers: int,
    num_blocks: int,
    kv_heads: int,
    head_dim: int,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    keys_by_position: bool = False,
) -> list[LayerCache]:
    """Each layer's cache, all zeros; on the CPU pages are taken from the system only as blocks are first used.

    Args:
        keys_by_position: see ``Backend``.
    """

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        if device.type == "cpu":
            count = int(np.prod(shape)) * dtype.itemsize
            return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)

    def scales() -> torch.Tensor | None:
        return zeros(num_blocks, kv_heads, block_tokens, dtype=_SCALES) if dtype == torch.int8 else None

    def keys() -> torch.Tensor:
        if keys_by_position:
            return zeros(num_blocks, kv_heads, block_tokens, head_dim).transpose(2, 3)
        return zeros(num_blocks, kv_heads, head_dim, block_tokens)

    return [
        LayerCache(
            keys=keys(),
            values=zeros(num_blocks, kv_heads, block_tokens, head_dim),
            key_scales=scales(),
            value_scales=scales(),
        )
        for _ in range(layers)
    ]


def enlarge(caches: list[LayerCache], others: list[LayerCache]) -> None:
    """Let the tensors of each layer's cache be those of others, wherever they are held. What was in them is lost."""
    for cache, other in zip(caches, others, strict=True):
        pairs = [(cache.keys, other.keys), (cache.values, other.values)]
        if cache.key_scales is not None and other.key_scales is not None:
            pairs.append((cache.key_scales, other.key_scales))
        if cache.value_scales is not None and other.value_scales is not None:
            pairs.append((cache.value_scales, other.value_scales))
        for tensor, new in pairs:
            tensor.set_(new)  # type: ignore[call-overload]  # the stub knows storages alone
