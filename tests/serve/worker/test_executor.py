"""Ranks as processes: started, refused, killed, frozen, gone."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from serve.config import KernelsConfig, ModelConfig, ServerConfig, SupervisorConfig
from serve.engine.executor import ExecutorDied
from serve.engine.plan import Span, Start, StepPlan
from serve.errors import ConfigError
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker.executor import RankExecutor
from tests.support.kernels import cpu_kernels
from tests.support.models import save


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("gpt_neox", tmp_path_factory.mktemp("model") / "neox", with_tokenizer=False)


def _config(model: Path, size: int = 2, heartbeat_timeout_seconds: float = 60.0) -> ServerConfig:
    return ServerConfig(
        model=ModelConfig(path=str(model), tensor_parallel_size=size, device="cpu"),
        supervisor=SupervisorConfig(heartbeat_timeout_seconds=heartbeat_timeout_seconds),
    )


@pytest.fixture
def started(model: Path) -> Iterator[RankExecutor]:
    executor = RankExecutor(_config(model, heartbeat_timeout_seconds=2.0))
    executor.start()
    yield executor
    executor.close()


def _plan(step: int, prompt: tuple[int, ...] = (3, 4, 5)) -> StepPlan:
    start = Start(
        sequence=SequenceId(step), index=0, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=SamplingParams()
    )
    span = Span(sequence=SequenceId(step), start=0, count=len(prompt), new_blocks=(BlockId(0),), sample=True)
    return StepPlan(step=step, starts=(start,), spans=(span,))


def _until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def _pids(executor: RankExecutor) -> list[int]:
    return [rank.process.pid for rank in executor._ranks]


def test_ranks_compute_without_the_kernels_and_leave_nothing_behind(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    executor = RankExecutor(dataclasses.replace(_config(model), kernels=KernelsConfig(cache_dir="/dev/null/cache")))
    before = set(os.listdir("/dev/shm"))
    facts = executor.start()
    assert (facts.family, facts.dtype, facts.vocab_size) == ("gpt_neox", "float32", 509)
    assert facts.attention == "torch"
    assert facts.linear in ("onednn", "torch")
    result = executor.execute(_plan(0))
    assert [s.sequence for s in result.sampled] == [0]
    assert executor.dead_rank() is None
    _until(lambda: max(executor.heartbeat_ages()) < 2.0)
    pids, folder = _pids(executor), executor._folder
    executor.close()
    executor.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert folder is not None
    assert not folder.exists()
    assert set(os.listdir("/dev/shm")) <= before
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "kernels" in line]
    assert line.startswith("rank 0 WARNING "), "one rank says it for all"
    assert "/dev/null/cache/kernels" in line
    assert "TESSERA_CACHE_DIR" in line


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_step_and_is_named(started: RankExecutor, victim: int) -> None:
    started.execute(_plan(0))
    os.kill(_pids(started)[victim], signal.SIGKILL)
    _until(started.dead_rank)
    message = started.dead_rank()
    assert message is not None
    assert f"rank {victim} died" in message
    assert "SIGKILL" in message
    with pytest.raises(ExecutorDied):
        started.execute(_plan(1))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_rank_is_noticed_and_close_frees_the_waiting_step(started: RankExecutor, victim: int) -> None:
    os.kill(_pids(started)[victim], signal.SIGSTOP)
    outcome: list[BaseException] = []

    def wait_for_ever() -> None:
        try:
            started.execute(_plan(0))
        except ExecutorDied as error:
            outcome.append(error)

    waiting = threading.Thread(target=wait_for_ever)
    waiting.start()
    _until(started.dead_rank)
    assert f"rank {victim} is frozen" in str(started.dead_rank())
    pids = _pids(started)
    started.close()
    waiting.join(timeout=120)
    assert len(outcome) == 1
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_what_a_rank_finds_wrong_is_a_configuration_error(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1, 2, 4"):
        RankExecutor(_config(model, size=3)).start()
    bert = tmp_path / "bert"
    bert.mkdir()
    for file in model.iterdir():
        (bert / file.name).write_bytes(file.read_bytes())
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    with pytest.raises(ConfigError, match="gpt_neo, gpt_neox"):
        RankExecutor(_config(bert, size=1)).start()
    (bert / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match=r"layers\.2"):
        RankExecutor(_config(bert, size=2)).start()
    long = dataclasses.replace(_config(model, size=1).model, max_model_len=4096)
    executor = RankExecutor(dataclasses.replace(_config(model, size=1), model=long))
    with pytest.raises(ConfigError, match="max_model_len is 4096; the model has 512"):
        executor.start()


def test_ranks_talk_as_much_as_their_server_and_end_with_the_thread_that_started_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    built = cpu_kernels()._name
    (tmp_path / "c++").write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp {built} "$2"\n')
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(logging.getLogger("serve"), "level", logging.INFO)
    executor = RankExecutor(
        dataclasses.replace(_config(model, size=1), kernels=KernelsConfig(cache_dir=str(tmp_path / "cache")))
    )
    thread = threading.Thread(target=executor.start)
    thread.start()
    thread.join()
    assert f"rank 0 INFO building the CPU kernels (a few seconds, once; kept in {tmp_path}" in capfd.readouterr().err
    [pid] = _pids(executor)
    _until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    executor.close()


def test_without_a_folder_for_temporary_files_it_is_said_what_to_set(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/dev/null/tmp"])
    with pytest.raises(ConfigError, match=r"No usable temporary directory .*; set TMPDIR to one that can be written"):
        RankExecutor(_config(model)).start()
