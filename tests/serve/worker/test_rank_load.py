"""In which order a rank gets ready: its GPU is taken first, and what may last long is done as one that waits for others."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from serve.config import CacheConfig, KernelsConfig, SchedulerConfig, ServerConfig
from serve.worker import canary, drafting, gpus, loader, parallel, rank_loop, sizing, trial, verify, wire
from serve.worker.kv_cache import CacheMemory
from serve.worker.parallel import Ranks
from serve.worker.progress import Progress
from tests.serve.worker.family_worker import settings
from tests.support.models import save


@pytest.fixture(autouse=True)
def _as_a_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a rank finds and changes, in the process of a test."""
    monkeypatch.setattr(rank_loop, "LEAN", ())
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    before, threads = torch.is_grad_enabled(), torch.get_num_threads()
    yield
    torch.set_grad_enabled(before)
    torch.set_num_threads(threads)


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    base = settings(save("llama", tmp_path / "llama", with_tokenizer=False), 1, "float32")
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, verify_logits=True),
        scheduler=SchedulerConfig(max_num_seqs=2, max_step_tokens=32),
    )


class _Followed:
    """The steps of a load as they come, and whether the rank's heartbeat then said that it waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.progress = Progress()
        self.order: list[str] = []
        self._patch = monkeypatch

    def note(self, what: str) -> None:
        self.order.append(f"{what}, waiting" if self.progress.waiting else what)

    def follow(self, owner: object, name: str) -> None:
        """Note each call and go on with it."""
        call: Callable[..., object] = getattr(owner, name)

        def noted(*args: object, **kwargs: object) -> object:
            self.note(name)
            return call(*args, **kwargs)

        self._patch.setattr(owner, name, noted)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> _Followed:
    found = _Followed(monkeypatch)
    for owner, name in (
        (gpus, "name_of"), (gpus, "take"), (gpus, "tell"), (drafting, "draft_bytes_per_block"), (loader, "load_rank"),
        (verify, "verify_logits"), (trial, "bytes_of_steps"), (canary, "check_forward"),
        (Ranks, "limit_exchanges"),
    ):  # fmt: skip
        found.follow(owner, name)
    monkeypatch.setattr(parallel, "join_ranks", lambda *_: found.note("join_ranks") or Ranks(0, 1))  # type: ignore[func-returns-value]  # None is meant
    return found


def _load(config: ServerConfig, followed: _Followed) -> wire.Report:
    """Get ready as a rank does; what it says of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        rank_loop._load(config, 0, "nowhere", -1, theirs, 0.0, followed.progress)
        return wire.decode_report(wire.receive(ours))


FIRST = ["name_of", "take", "tell", "draft_bytes_per_block", "load_rank", "join_ranks"]


def test_a_rank_takes_its_gpu_before_all_else_and_compares_logits_while_the_others_may_wait(
    config: ServerConfig, followed: _Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[torch.device, CacheConfig]] = []
    monkeypatch.setattr(gpus, "take", lambda device, cache: followed.note("take") or taken.append((device, cache)))  # type: ignore[func-returns-value]  # None is meant
    assert isinstance(_load(config, followed), wire.Ready)
    assert followed.order == [*FIRST, "check_forward, waiting", "verify_logits, waiting", "limit_exchanges"]
    assert taken == [(torch.device("cpu"), config.cache)]


def test_where_blocks_are_measured_logits_are_compared_once_and_steps_are_tried_as_one_that_waits(
    config: ServerConfig, followed: _Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(config, cache=CacheConfig(), kernels=KernelsConfig(cuda_graphs="on"))
    monkeypatch.setattr(sizing, "choose_memory", lambda *_, **__: CacheMemory(3 << 20, "for this test"))
    assert isinstance(_load(config, followed), wire.Ready)
    assert followed.order == [
        *FIRST, "verify_logits, waiting", "bytes_of_steps, waiting", "check_forward, waiting", "limit_exchanges",
    ]  # fmt: skip


def test_logits_are_not_compared_unasked(config: ServerConfig, followed: _Followed) -> None:
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, verify_logits=False))
    assert isinstance(_load(config, followed), wire.Ready)
    assert followed.order == [*FIRST, "check_forward, waiting", "limit_exchanges"]


@pytest.mark.parametrize("at", ["take", "verify_logits"])
def test_what_fails_on_the_way_is_reported_with_the_rank(
    at: str, config: ServerConfig, followed: _Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered\nmore")

    monkeypatch.setattr({"take": gpus, "verify_logits": verify}[at], at, fail)
    said = _load(config, followed)
    assert isinstance(said, wire.Failed)
    assert said.message == "rank 0: the cpu failed while the model was loaded: CUDA error: device-side assert triggered"
    assert not said.configured
