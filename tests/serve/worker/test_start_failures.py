"""Starts that fail: a rank that lost another is not blamed for it, and nothing stays open while the error is remembered."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from serve.config import ModelConfig, ServerConfig
from serve.errors import RankStartError
from serve.worker import executor as executor_module
from serve.worker import wire
from serve.worker.executor import RankExecutor
from serve.worker.rank import Rank
from tests.support.descriptors import descriptors
from tests.support.models import save

PROGRAM = """
import os, sys, time

def lose_the_other(event, args):
    if event == "open" and str(args[0]).endswith(".safetensors"):
        if os.environ["LOCAL_RANK"] == "1":
            time.sleep(3600)
        raise RuntimeError("[/torch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")

sys.addaudithook(lose_the_other)
"""
SENTENCE = "rank 0: the exchange with other ranks failed while the model was loaded: .*Connection reset by peer"


@pytest.fixture
def executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankExecutor:
    """Rank 0 finds that it has lost rank 1, which goes on."""
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "sitecustomize.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "program"))
    path = str(save("gpt_neox", tmp_path / "model", with_tokenizer=False))
    return RankExecutor(ServerConfig(model=ModelConfig(path=path, tensor_parallel_size=2, device="cpu")))


def test_the_end_of_a_rank_explains_what_another_says_of_it_first(
    executor: RankExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_of: Callable[[Rank], wire.Report] = executor._first_report

    def then_dies(rank: Rank) -> wire.Report:
        report = report_of(rank)
        if rank.number == 0:
            assert isinstance(report, wire.Failed)
            assert report.by_others
            os.kill(executor._ranks[1].process.pid, signal.SIGKILL)
        return report

    monkeypatch.setattr(executor, "_first_report", then_dies)
    with pytest.raises(RankStartError, match="rank 1 ended while it started: signal SIGKILL"):
        executor.start()


def test_where_nobody_ended_the_exchange_that_failed_is_told_without_a_traceback(
    executor: RankExecutor, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RankStartError, match=SENTENCE):
        executor.start()
    said = "".join(capfd.readouterr()) + caplog.text
    assert "Connection reset by peer" in said
    assert "Traceback" not in said


def test_a_start_without_descriptors_leaves_none_open_while_its_error_is_remembered(
    executor: RankExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(executor_module, "RankOutput", none_left)
    before = descriptors()
    with pytest.raises(RankStartError, match="Too many open files") as remembered:
        executor.start()
    assert descriptors() <= before
    assert remembered.value.__cause__ is not None, "with what its frames held"
