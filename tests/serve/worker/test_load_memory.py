"""A rank holds its own part of the model and little else while it loads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from checkpoint import CheckpointWriter
from serve.config import CacheConfig, ModelConfig, ServerConfig
from serve.worker.executor import RankExecutor

MIB = 1 << 20
OF_CUDA = 300 * MIB if torch.version.cuda else 0
"""What torch takes when it is imported, beyond a build for CPUs: 499 MiB for 219 of 2.13."""


def test_peak_memory_is_the_shard_the_largest_slice_and_600_mib(tmp_path: Path) -> None:
    config = GPTNeoXConfig(
        hidden_size=1024,
        num_hidden_layers=18,
        num_attention_heads=16,
        intermediate_size=4096,
        vocab_size=50_304,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    count = sum(shape.numel() for shape in shapes.values())
    assert count >= 300_000_000
    with CheckpointWriter(tmp_path, step=1, config=json.loads(config.to_json_string(use_diff=False))) as writer:
        for name, shape in shapes.items():
            writer.add(name, torch.full(shape, 0.01, dtype=torch.bfloat16))

    executor = RankExecutor(
        ServerConfig(
            model=ModelConfig(path=str(tmp_path), tensor_parallel_size=2, device="cpu"), cache=CacheConfig(kv_cache_gib=0.01)
        )
    )
    try:
        executor.start()
        peaks = [_peak_bytes(rank.process.pid) for rank in executor._ranks]
    finally:
        executor.close()

    shard = count * 2 // 2
    largest_slice = 50_304 * 1024 * 2 // 2
    limit = shard + largest_slice + 600 * MIB + OF_CUDA
    assert max(peaks) <= limit, f"peak {max(peaks) / MIB:.0f} MiB, limit {limit / MIB:.0f} MiB"


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
