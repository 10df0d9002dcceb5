"""How much memory the KV blocks take when nobody says so, and how that is told."""

from __future__ import annotations

import pytest
import torch

from host import limits
from serve.config import CacheConfig, SchedulerConfig
from serve.errors import ConfigError
from serve.worker.kv_cache import GIB, choose_memory, choose_num_blocks

CPU = torch.device("cpu")


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 GiB, of which half is taken."""
    monkeypatch.setattr(limits, "memory_available", lambda: GIB)
    monkeypatch.setattr(limits, "memory_limit", lambda: 2 * GIB)


@pytest.mark.usefixtures("container")
def test_the_default_stays_within_the_container() -> None:
    memory = choose_memory(CacheConfig(), CPU, local_ranks=2)
    assert memory.num_bytes == GIB // 8
    assert str(memory).startswith("0.12 GiB a rank, a quarter of what is free for 2 ranks, at most 4.0 GiB each")
    assert str(memory).endswith("(1.0 GiB free of the container's limit of 2.0 GiB)")


def test_the_default_is_4_gib_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "memory_available", lambda: 100 * GIB)
    assert choose_memory(CacheConfig(), CPU, local_ranks=1).num_bytes == 4 * GIB


@pytest.mark.usefixtures("container")
def test_what_was_asked_for_is_taken_and_warned_of_where_it_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_memory(CacheConfig(kv_cache_gib=0.5), CPU, local_ranks=2).num_bytes == GIB // 2
    assert not caplog.records
    assert choose_memory(CacheConfig(kv_cache_gib=0.75), CPU, local_ranks=2).num_bytes == 3 * GIB // 4
    assert "cache.kv_cache_gib is 0.75, which is more than there is: 1.0 GiB free of the container's limit" in caplog.text


@pytest.mark.parametrize(
    ("free", "cache", "expected"),
    [
        (70, CacheConfig(memory_fraction=0.9), 72 - 10.5 - 3),
        (40, CacheConfig(memory_fraction=0.9), 40 - 0.5 - 3),
        (70, CacheConfig(memory_fraction=0.5), 40 - 10.5 - 3),
        (70, CacheConfig(kv_cache_gib=20.0), 20),
    ],
    ids=["a share of it", "what others leave", "a smaller share", "what was asked for"],
)
def test_a_gpus_share_is_what_weights_libraries_and_steps_leave_of_it(
    monkeypatch: pytest.MonkeyPatch, free: int, cache: CacheConfig, expected: float
) -> None:
    """80 GiB of which the weights have 10 and the libraries half a one; what steps take is 3."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * GIB)
    memory = choose_memory(cache, torch.device("cuda:0"), local_ranks=2, steps_bytes=3 * GIB)
    assert memory.num_bytes == expected * GIB, memory
    assert f"{free}.0 GiB free on the device, 10.0 GiB taken, 3.0 GiB kept for steps and 0.5 GiB for libraries" in str(memory)


@pytest.mark.usefixtures("container")
def test_memory_for_less_than_a_block_is_refused_with_the_reason() -> None:
    cache, scheduler = CacheConfig(), SchedulerConfig()
    memory = choose_memory(cache, CPU, local_ranks=1)
    assert choose_num_blocks(memory, cache=cache, scheduler=scheduler, max_model_len=16, bytes_per_block=1 << 20) == 256
    assert choose_num_blocks(memory, cache=cache, scheduler=scheduler, max_model_len=32, bytes_per_block=1 << 20) == 256
    with pytest.raises(ConfigError, match=r"one block of 16 positions takes .* there is less: 0.25 GiB a rank, a quarter of"):
        choose_num_blocks(memory, cache=cache, scheduler=scheduler, max_model_len=16, bytes_per_block=GIB)
