"""How ranks' processes are made: forked, forked again, and started as programs where there is nothing to fork."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import threading
from pathlib import Path

import psutil
import pytest

from serve.config import ModelConfig, ServerConfig, SupervisorConfig
from serve.engine.plan import Span, Start, StepPlan
from serve.errors import RankStartError
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker import rank_process
from serve.worker.executor import RankExecutor
from serve.worker.rank_process import ForkStarter, can_fork
from tests.support.descriptors import descriptors
from tests.support.models import save
from tests.support.server import until

START = Start(sequence=SequenceId(0), index=0, token_ids=(3, 4, 5), num_prompt_tokens=3, sampling=SamplingParams())
SPAN = Span(sequence=SequenceId(0), start=0, count=3, new_blocks=(BlockId(0),), sample=True)
PLAN = StepPlan(step=0, starts=(START,), spans=(SPAN,))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("gpt_neox", tmp_path_factory.mktemp("model") / "neox", with_tokenizer=False)


def options(model: Path, size: int) -> ServerConfig:
    return ServerConfig(
        model=ModelConfig(path=str(model), tensor_parallel_size=size, device="cpu"),
        supervisor=SupervisorConfig(heartbeat_timeout_seconds=60.0, load_stall_seconds=60.0),
    )


def processes(executor: RankExecutor) -> list[psutil.Process]:
    return [psutil.Process(rank.process.pid) for rank in executor._ranks]


def frozen(stall_seconds: float) -> ForkStarter:
    """One whose imports do not go on."""
    starter = ForkStarter(1, "cpu", stall_seconds=stall_seconds)
    assert starter._server is not None
    os.kill(starter._server.pid, signal.SIGSTOP)
    return starter


def test_ranks_are_forked_again_after_a_death_and_started_as_programs_where_there_is_nothing_to_fork(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = []
    with contextlib.closing(ForkStarter(2, "cpu", stall_seconds=60.0)) as starter:
        for forked in ([True, True], [True, True], [False, True]):
            executor = RankExecutor(options(model, 2), starter)
            if not all(forked):
                assert starter._server is not None
                os.kill(starter._server.pid, signal.SIGKILL)
            executor.start()
            answers.append(executor.execute(PLAN).sampled)
            ranks = processes(executor)
            assert [rank.name() for rank in ranks] == ["tessera-rank-0", "tessera-rank-1"]
            assert ["host.fork_server" in rank.cmdline() for rank in ranks] == forked
            ranks[1].kill()
            until(executor.dead_rank)
            assert executor.dead_rank() == "rank 1 died: signal SIGKILL"
            executor.close()
    assert answers[0] == answers[1] == answers[2]
    assert "what ranks are forked from is gone (signal SIGKILL): rank 0 is started as a program" in caplog.text


def test_a_frozen_import_ends_the_start(model: Path) -> None:
    with contextlib.closing(frozen(1.5)) as starter:
        executor = RankExecutor(options(model, 1), starter)
        with pytest.raises(RankStartError, match="what ranks are forked from hangs or is frozen"):
            executor.start()
        assert not executor._ranks


def test_a_stop_during_the_imports_is_obeyed(model: Path) -> None:
    raised: list[RankStartError] = []

    def start() -> None:
        try:
            executor.start()
        except RankStartError as error:
            raised.append(error)

    with contextlib.closing(frozen(600.0)) as starter:
        executor = RankExecutor(options(model, 1), starter)
        thread = threading.Thread(target=start)
        thread.start()
        assert starter._server is not None
        until(starter._server._lock.locked)
        executor.close()
        thread.join(timeout=400)
    assert [str(error) for error in raised] == ["the ranks were stopped while they started"]


def test_ranks_for_which_there_are_no_descriptors_are_not_started_and_may_be_later(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = descriptors()
    for owner, name in ((os, "memfd_create"), (socket, "socketpair")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refuse)
            with pytest.raises(RankStartError, match=re.escape(f"the ranks could not be started: [Errno {errno.EMFILE}]")):
                RankExecutor(options(model, 1)).start()
    assert descriptors() <= before


def test_ranks_that_may_compute_on_a_gpu_are_not_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What imports for them asks CUDA how many there are, and a fork of who asked can use none."""
    gpus = (tmp_path / "nvidiactl", tmp_path / "dxg")
    monkeypatch.setattr(rank_process, "_GPUS", gpus)
    assert [can_fork(device) for device in ("cpu", "auto", "cuda")] == [True, True, False]
    for gpu in gpus:
        gpu.touch()
        assert [can_fork(device) for device in ("cpu", "auto", "cuda")] == [True, False, False]
        gpu.unlink()
