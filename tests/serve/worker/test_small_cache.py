"""A KV cache of whole numbers under everything that touches a cache; what is refused; how much of it there is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

import pytest
import torch

from serve.config import CacheConfig, ModelConfig, ServerConfig
from serve.errors import ConfigError
from serve.worker import loader
from serve.worker.kv_cache import block_bytes, cache_dtype
from serve.worker.loader import RankModel, Stopwatch, load_rank
from serve.worker.parallel import Ranks
from serve.worker.runner import Runner
from tests.serve.worker.family_worker import IN_INT8, PROMPTS, generate, load, logits
from tests.serve.worker.test_family_parity import by_ranks
from tests.serve.worker.test_speculation import answers, requests
from tests.support.kernels import cpu_kernels
from tests.support.models import save

KEPT_TOKENS = 0.9
"""Of the greedy tokens of a random model, whose choices are close: as many at least are those of a plain cache."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("small")
    save("llama", root / IN_INT8, with_tokenizer=False, num_hidden_layers=2)
    return root / IN_INT8


def loaded(folder: Path, kept: Literal["auto", "int8"], **cache: object) -> RankModel:
    config = ServerConfig(
        model=ModelConfig(path=str(folder), dtype="float32", device="cpu"),
        cache=CacheConfig(kv_cache_dtype=kept, kv_cache_gib=0.002, block_tokens=4, **cache),  # type: ignore[arg-type]
    )
    return load_rank(config, 0, torch.device("cpu"), lambda: Ranks(0, 1), Stopwatch())[0]


@pytest.mark.parametrize("with_kernels", [True, False])
def test_logits_are_those_of_a_plain_cache_to_the_rounding_of_whole_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, with_kernels: bool
) -> None:
    if with_kernels:
        cpu_kernels()
    else:
        monkeypatch.setattr(loader, "load_kernels", lambda *_: None)
    small = logits(load(folder, 1, Ranks(0, 1)), Ranks(0, 1))
    plain = logits(load(folder.rename(folder.with_name("plain")), 1, Ranks(0, 1)), Ranks(0, 1))
    folder.with_name("plain").rename(folder)
    assert small is not None
    assert plain is not None
    assert 0 < float((small - plain).norm() / plain.norm()) < 0.02


def test_every_switch_says_the_same_over_a_cache_of_whole_numbers(folder: Path) -> None:
    cpu_kernels()
    model = loaded(folder, "int8")
    assert model.facts.cache_memory.endswith(", in int8")
    generations = [dataclasses.replace(generation, num_sequences=1) for generation in requests()[:20]]
    plain, failed, _ = answers(model, generations)
    for limits in (
        {"prefix_caching": 0, "max_num_seqs": 1},
        {"speculative_tokens": 3, "num_blocks": 30, "max_step_tokens": 24},
    ):
        again, also_failed, stats = answers(model, generations, **limits)
        assert {key: said[:2] for key, said in again.items()} == {key: said[:2] for key, said in plain.items()}
        assert also_failed == failed
        assert (stats.preemptions > 0) == ("num_blocks" in limits)


@pytest.mark.slow
def test_two_ranks_say_what_one_says(folder: Path) -> None:
    cpu_kernels()
    alone = generate(Runner(load(folder, 1, Ranks(0, 1)), Ranks(0, 1)), Ranks(0, 1))
    together = by_ranks(folder.parent, 2)[IN_INT8]
    pairs = [pair for ours, theirs in zip(alone, together, strict=True) for pair in zip(ours, theirs, strict=True)]
    assert sum(one == other for one, other in pairs) >= KEPT_TOKENS * len(pairs), json.dumps([alone, together, len(PROMPTS)])


def test_a_block_of_whole_numbers_takes_half_of_one_in_bf16_and_a_scale_for_each_position_and_head(folder: Path) -> None:
    size = {"layers": 3, "kv_heads": 2, "head_dim": 64, "block_tokens": 16}
    whole, half = (block_bytes(**size, dtype=dtype) for dtype in (torch.int8, torch.bfloat16))
    assert (whole, half) == (2 * 3 * 2 * 16 * 66, 2 * 3 * 2 * 16 * 128)
    plain, small = (loaded(folder, kept).facts.num_blocks for kept in ("auto", "int8"))  # type: ignore[arg-type]
    assert small / plain > 3.5, "a plain one is in fp32 here"


def test_a_cache_that_nothing_computes_with_is_refused_by_name() -> None:
    assert cache_dtype("auto", "cuda", torch.bfloat16) == torch.bfloat16
    assert cache_dtype("int8", "cpu", torch.bfloat16) == torch.int8
    assert cache_dtype("fp8", "cuda", torch.bfloat16) == torch.float8_e4m3fn
    with pytest.raises(
        ConfigError, match=r"^cache.kv_cache_dtype is fp8; it is for GPUs, and model.device is cpu: choose auto, or int8$"
    ):
        cache_dtype("fp8", "cpu", torch.bfloat16)
    with pytest.raises(
        ConfigError, match=r"^cache.kv_cache_dtype is int8; it is for the CPU, and model.device is cuda: choose auto$"
    ):
        cache_dtype("int8", "cuda", torch.bfloat16)
    assert cache_dtype("fp8", "cuda", torch.float16) == torch.float8_e4m3fn
    with pytest.raises(
        ConfigError,
        match=r"^cache.kv_cache_dtype is fp8; it is for models in bfloat16 or float16, and this one computes in float32: "
        r"choose auto, or another model.dtype$",
    ):
        cache_dtype("fp8", "cuda", torch.float32)
