"""The KV blocks' memory on one rank: every layer's keys and values, and how many blocks fit."""

from __future__ import annotations

import numpy as np
import psutil
import torch

from serve.config import CacheConfig, SchedulerConfig
from serve.errors import ConfigError
from serve.model.attention import LayerCache

GIB = 1 << 30
_CPU_SHARE = 0.25
_CPU_MOST_BYTES = 4 * GIB


def block_bytes(*, layers: int, kv_heads: int, head_dim: int, block_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one block in all layers of this rank, keys and values."""
    return 2 * layers * kv_heads * head_dim * block_tokens * dtype.itemsize


def choose_num_blocks(
    *,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    max_model_len: int,
    bytes_per_block: int,
    device: torch.device,
    local_ranks: int,
) -> int:
    """How many blocks this rank can hold.

    ``cache.kv_cache_gib`` decides where it is given. Else, on a GPU, what ``cache.memory_fraction`` leaves after the weights;
    on the CPU a quarter of the free memory shared by the local ranks, at most 4 GiB each. Never more than all sequences at
    full length could use.

    Raises:
        ConfigError: not even one block fits.
    """
    useful = scheduler.max_num_seqs * -(-max_model_len // cache.block_tokens)
    if cache.kv_cache_gib is not None:
        budget = int(cache.kv_cache_gib * GIB)
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - (1.0 - cache.memory_fraction) * total)
    else:
        budget = min(_CPU_MOST_BYTES, int(psutil.virtual_memory().available * _CPU_SHARE / local_ranks))
    blocks = min(useful, budget // bytes_per_block)
    if blocks < 1:
        raise ConfigError(
            f"cache.kv_cache_gib leaves {budget} bytes; one block of {cache.block_tokens} positions takes {bytes_per_block}"
        )
    return int(blocks)


def allocate(
    *, layers: int, num_blocks: int, kv_heads: int, head_dim: int, block_tokens: int, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """Each layer's cache, all zeros; on the CPU pages are taken from the system only as blocks are first used."""

    def zeros(*shape: int) -> torch.Tensor:
        if device.type == "cpu":
            count = int(np.prod(shape)) * dtype.itemsize
            return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)

    return [
        LayerCache(
            keys=zeros(num_blocks, kv_heads, head_dim, block_tokens), values=zeros(num_blocks, kv_heads, block_tokens, head_dim)
        )
        for _ in range(layers)
    ]
