"""How many KV blocks a rank has, and what of its memory they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from transformers import PretrainedConfig

from serve.config import ServerConfig
from serve.model.families import head_dim
from serve.model.heads import HeadCut, Stage
from serve.model.load import Blueprint
from serve.worker.computing import captures_on_cpu
from serve.worker.kv_cache import GIB, block_bytes, choose_memory, choose_num_blocks
from serve.worker.parallel import Ranks

_FIRST_POSITIONS: Final = 512
"""More than the made-up sequences have that a start computes."""


class Surveyed(Protocol):
    """What is to be known of a model before its blocks can be counted."""

    @property
    def model_config(self) -> PretrainedConfig: ...

    @property
    def layers(self) -> int: ...

    @property
    def blueprint(self) -> Blueprint: ...

    @property
    def cache_dtype(self) -> torch.dtype: ...

    @property
    def heads(self) -> HeadCut: ...

    @property
    def max_model_len(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The KV blocks of one rank."""

    count: int
    """Blocks in the rank's pool; the same on every rank."""
    kv_heads: int
    """Key/value heads in each."""
    memory: str
    """What they take of what, in words."""
    steps_bytes: int = 0
    """What they leave to steps of a device."""


def is_measured(config: ServerConfig, device: torch.device) -> bool:
    """Whether blocks are counted when steps have shown what they take: on a device, where nobody says how many there are.

    So it is on the CPU where steps are captured as they are on a device.
    """
    return config.cache.kv_cache_gib is None and (device.type == "cuda" or captures_on_cpu(config, device))


def few_blocks(plan: Surveyed, config: ServerConfig, ranks: Ranks) -> Blocks:
    """Enough blocks to try steps with: what the largest step has positions for, and the first sequences of a start."""
    positions = max(config.scheduler.max_step_tokens, _FIRST_POSITIONS)
    count = -(-positions // config.cache.block_tokens) + 1
    return Blocks(count=count, kv_heads=plan.heads.shared_heads(ranks.rank).width, memory="")


def bytes_per_block(plan: Surveyed, config: ServerConfig, kv_heads: int, stage: Stage) -> int:
    """Bytes of one block of a rank of this stage that has so many key/value heads."""
    return block_bytes(
        layers=stage.layers(plan.layers).width,
        kv_heads=kv_heads,
        head_dim=head_dim(plan.model_config),
        block_tokens=config.cache.block_tokens,
        dtype=plan.cache_dtype,
    )


def choose_blocks(
    plan: Surveyed,
    config: ServerConfig,
    ranks: Ranks,
    device: torch.device,
    beside: int,
    num_blocks: int | None,
    *,
    promised_bytes: int = 0,
    steps_bytes: int = 0,
) -> Blocks:
    """Agree with the other ranks on how many blocks each of them has memory for.

    Args:
        beside: bytes that another model's part of each block takes.
        num_blocks: as many as this, where it is decided already.
        promised_bytes: what weights of this rank will take that are not packed yet; the others' will as much.
        steps_bytes: what steps take of a device beside weights and blocks.
    """
    kv_heads = plan.heads.shared_heads(ranks.rank).width
    each = bytes_per_block(plan, config, kv_heads, ranks.stage) + beside
    if num_blocks is not None:
        return Blocks(count=num_blocks, kv_heads=kv_heads, memory="")
    # Of several machines the one with most ranks: the rank with least room decides for all.
    local_ranks = max(config.ranks_per_node)
    memory = choose_memory(config.cache, device, local_ranks, promised_bytes=promised_bytes, steps_bytes=steps_bytes)
    mine = choose_num_blocks(
        memory,
        cache=config.cache,
        scheduler=config.scheduler,
        max_model_len=plan.max_model_len,
        bytes_per_block=each,
    )
    count = ranks.smallest(mine)
    told = f"{count * each / GIB:.2f} of {memory}"
    if plan.cache_dtype != plan.blueprint.dtype:
        told += f", in {str(plan.cache_dtype).removeprefix('torch.')}"
    return Blocks(count=count, kv_heads=kv_heads, memory=told, steps_bytes=steps_bytes)
