"""Which GPU a rank takes, and what the ranks of several GPUs are told of their exchange."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from serve.config import CacheConfig, ModelConfig, NodesConfig, ServerConfig
from serve.errors import ConfigError
from serve.model.heads import Stage
from serve.worker import gpus, loader
from serve.worker.parallel import Ranks
from serve.worker.rank_loop import choose_device
from serve.worker.rank_process import rank_environment
from tests.support.models import save

UUIDS = "GPU-8f1c2b3a-0d41-4f2e-9c56-77aa0b1c2d3e,GPU-00000000-0d41-4f2e-9c56-77aa0b1c2d3e"
SLICE = "MIG-8f1c2b3a-0d41-4f2e-9c56-77aa0b1c2d3e"


def test_ranks_take_the_gpus_that_are_named_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    model = ModelConfig(path="model", tensor_parallel_size=2, gpus="3,1")
    for number in range(2):
        environment = rank_environment(number, 2, model.device, model.gpus)
        assert (environment["CUDA_VISIBLE_DEVICES"], environment["LOCAL_RANK"]) == ("3,1", str(number))
        assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "as nvidia-smi numbers them"
    assert rank_environment(0, 2, "cuda")["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


@pytest.mark.parametrize(("gpus", "size"), [("0", 1), ("2,0,1", 2), (UUIDS, 2), (SLICE, 1), ("MIG-GPU-8f1c/3/0", 1)])
def test_gpus_are_named_by_number_or_uuid(gpus: str, size: int) -> None:
    assert ModelConfig(path="model", gpus=gpus, tensor_parallel_size=size).gpus == gpus


@pytest.mark.parametrize(
    ("gpus", "size", "device", "rule"),
    [
        ("0", 2, "auto", "name one GPU for each of 2 ranks"),
        ("0,0", 2, "auto", "be different numbers or UUIDs"),
        ("0;1", 2, "auto", "be different numbers or UUIDs"),
        ("0,", 1, "cuda", "be different numbers or UUIDs"),
        ("-1", 1, "cuda", "be different numbers or UUIDs"),
        ("0", 1, "cpu", "be empty with model.device cpu"),
        (f"0,{SLICE}", 2, "auto", "name whole GPUs for several ranks"),
    ],
)
def test_names_of_gpus_that_cannot_be_are_refused(gpus: str, size: int, device: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model.gpus .*{rule}"):
        ModelConfig(path="model", gpus=gpus, tensor_parallel_size=size, device=device)


def test_gpus_of_several_nodes_are_named_on_each() -> None:
    nodes = NodesConfig(count=2, agents_listen="10.0.0.1:1", agents_key_file="key")
    with pytest.raises(ConfigError, match=r"^model.gpus .* CUDA_VISIBLE_DEVICES of each node"):
        ServerConfig(model=ModelConfig(path="model", gpus="0,1", tensor_parallel_size=2), nodes=nodes)


def test_a_rank_without_a_gpu_is_told_what_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{SLICE},{SLICE}0")
    assert choose_device("auto", 0) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"there are 1 CUDA devices, by CUDA_VISIBLE_DEVICES 'MIG-.*one slice \(MIG\)$"):
        choose_device("auto", 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ConfigError, match=r"asks for rank 1; there are 1 CUDA devices$"):
        choose_device("auto", 1)


def test_a_failed_exchange_of_gpus_ends_a_rank_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    environment = rank_environment(1, 2, "cuda")
    assert environment["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


@pytest.mark.parametrize(
    ("backend", "size", "stages", "limited"), [("nccl", 2, 1, 1), ("nccl", 1, 1, 0), ("gloo", 2, 1, 0), ("nccl", 1, 2, 2)]
)
def test_an_exchange_of_gpus_may_take_as_long_as_a_step_within_a_stage_and_between_them(
    backend: str, size: int, stages: int, limited: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[tuple[timedelta, object]] = []
    own = None if stages == 1 else object()
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(distributed_c10d, "_set_pg_timeout", lambda *limit: limits.append(limit))
    Ranks(0, size, stage=Stage(0, stages), group=cast("dist.ProcessGroup | None", own)).limit_exchanges(120.0)
    assert limits == [(timedelta(seconds=120), group) for group in (None, own)[:limited]]


@pytest.mark.parametrize(
    ("visible", "name", "called"),
    [
        ("", "NVIDIA H100 80GB HBM3", "GPU-8f1c"),
        (SLICE, "NVIDIA H100 80GB HBM3", "MIG-8f1c"),
        ("", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "MIG-8f1c"),  # by a container's runtime, which names it elsewhere
    ],
)
def test_a_slice_is_called_by_the_name_that_the_driver_has_for_it(
    visible: str, name: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name=name, uuid="8f1c"))
    assert gpus.uuid_of(torch.device("cuda:0")) == called


def test_small_numbers_go_by_one_group_beside_that_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    made, used = list[str](), list[object]()
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "new_group", lambda backend: made.append(backend) or "small")  # type: ignore[func-returns-value]  # None is meant
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op, group: used.append(group))
    ranks = Ranks(0, 2)
    assert [ranks.smallest(value) for value in (3, 4)] == [3, 4]
    assert (made, used) == (["gloo"], ["small", "small"])


@pytest.mark.parametrize(
    ("free", "allocated", "reserved", "steps", "kv_cache_gib", "left"),
    [
        (8, 71, 71, 0, None, 1),  # the cache has filled this process's share of 72 GiB: what the device has free is others'
        (8, 71, 71, 1, None, 0),  # and what of the share is left was kept for steps
        (12, 60, 68, 9, None, 3),  # of what graphs have of it no tensor is in at the moment
        (8, 73, 73, 0, None, 0),
        (5, 40, 40, 0, None, 5),  # others hold more than what is beyond the share
        (5, 40, 42, 3, None, 4),
        (8, 71, 71, 0, 30.0, 8),  # a cache of a given size, without a limit on the process
    ],
)
def test_what_is_left_of_a_gpu_is_within_the_share_of_the_process_and_what_steps_take_stays_theirs(
    free: int,
    allocated: int,
    reserved: int,
    steps: int,
    kv_cache_gib: float | None,
    left: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: allocated * gib)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved * gib)
    cache = CacheConfig(memory_fraction=0.9, kv_cache_gib=kv_cache_gib)
    assert gpus.bytes_left(torch.device("cuda"), cache, steps * gib) == left * gib


def test_a_gpu_without_a_number_is_the_current_one() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: 3)
        assert gpus.numbered(torch.device("cuda")) == torch.device("cuda:3")
    assert gpus.numbered(torch.device("cuda:1")) == torch.device("cuda:1")
    assert gpus.numbered(torch.device("cpu")) == torch.device("cpu")


def test_a_rank_is_loaded_onto_a_numbered_gpu_whatever_it_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch sets none without a number, which a fake that takes anything would not tell."""
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda.set_device(torch.device("cuda"))
    asked: list[torch.device] = []

    def surveyed(checkpoint: object, config: ServerConfig, device: torch.device) -> None:
        asked.append(device)
        raise ConfigError("seen enough")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(loader, "survey", surveyed)
    config = ServerConfig(model=ModelConfig(path=str(save("gpt2", tmp_path / "model", with_tokenizer=False))))
    with pytest.raises(ConfigError, match="seen enough"):
        loader.load_rank(config, 0, torch.device("cuda"), lambda: Ranks(0, 1), loader.Stopwatch())
    assert asked == [torch.device("cuda:2")]


def test_a_process_is_kept_within_its_share_of_a_gpu_unless_its_cache_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, used = list[tuple[float, torch.device]](), list[torch.device]()
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: kept.append((share, device)))
    first = torch.device("cuda:1")
    gpus.take(first, CacheConfig(memory_fraction=0.4))
    gpus.take(first, CacheConfig(memory_fraction=0.4, kv_cache_gib=2.0))
    gpus.take(torch.device("cpu"), CacheConfig(memory_fraction=0.4))
    assert kept == [(0.4, first)]
    assert used == [first, first], "what is made without a word of where lies there"
