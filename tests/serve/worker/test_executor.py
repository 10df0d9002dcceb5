"""Ranks as processes: started, refused, killed, frozen, gone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from serve.config import KernelsConfig, ModelConfig, ServerConfig, SupervisorConfig
from serve.engine.executor import ExecutorDied, loss_reason
from serve.engine.plan import Span, Start, StepPlan
from serve.errors import ConfigError, RankStartError
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker import wire
from serve.worker.executor import RankExecutor
from serve.worker.loader import Stopwatch, load_rank
from serve.worker.parallel import Ranks
from serve.worker.rank import Rank
from serve.worker.rank_output import RankOutput
from serve.worker.rank_process import ForkStarter
from serve.worker.vitals import Vitals
from tests.support.kernels import cpu_kernels
from tests.support.models import build, save
from tests.support.shared_memory import abandoned, in_shared_memory

PATIENCE_SECONDS = 120.0
"""For what comes within a moment on a machine that has nothing else to do."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("gpt_neox", tmp_path_factory.mktemp("model") / "neox", with_tokenizer=False)


def _config(model: Path, size: int = 2, *, frozen_seconds: float = 60.0, stalled_seconds: float = 60.0) -> ServerConfig:
    return ServerConfig(
        model=ModelConfig(path=str(model), tensor_parallel_size=size, device="cpu"),
        supervisor=SupervisorConfig(heartbeat_timeout_seconds=frozen_seconds, load_stall_seconds=stalled_seconds),
    )


@pytest.fixture(scope="module")
def starter() -> Iterator[ForkStarter]:
    with contextlib.closing(ForkStarter(2, "cpu", stall_seconds=60.0)) as starter:
        yield starter


@pytest.fixture
def started(model: Path, starter: ForkStarter) -> Iterator[RankExecutor]:
    executor = RankExecutor(_config(model, frozen_seconds=2.0), starter)
    executor.start()
    yield executor
    executor.close()


def _plan(step: int, prompt: tuple[int, ...] = (3, 4, 5)) -> StepPlan:
    start = Start(
        sequence=SequenceId(step), index=0, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=SamplingParams()
    )
    span = Span(sequence=SequenceId(step), start=0, count=len(prompt), new_blocks=(BlockId(0),), sample=True)
    return StepPlan(step=step, starts=(start,), spans=(span,))


def _until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def _pids(executor: RankExecutor) -> list[int]:
    return [rank.process.pid for rank in executor._ranks]


def test_ranks_compute_without_the_kernels_and_leave_nothing_behind(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor do they take a module from the folder that the server was started in."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    for name in ("serve", "checkpoint", "host", "torch", "msgspec"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'seen')!r}, 'a').write({name!r})\nraise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep)
    monkeypatch.setattr("tempfile.tempdir", None)
    caplog.set_level(logging.INFO, "serve.worker.executor")
    executor = RankExecutor(dataclasses.replace(_config(model), kernels=KernelsConfig(cache_dir="/dev/null/cache")))
    before = in_shared_memory()
    facts = executor.start()
    assert (facts.family, facts.dtype, facts.vocab_size) == ("gpt_neox", "float32", 509)
    assert facts.attention == "torch"
    assert facts.linear in ("onednn", "torch")
    result = executor.execute(_plan(0))
    (first,) = result.sampled
    assert first.sequence == 0
    # Nor do they need them to tell each other what was drawn: rank 1 goes on with the token that it would have been told.
    executor.launch(StepPlan(step=1, spans=(Span(sequence=SequenceId(0), start=3, count=1, continues=True, sample=True),)))
    second = executor.collect().sampled[0].token_id
    assert [s.token_id for s in executor.execute(_plan(2, (3, 4, 5, first.token_id))).sampled] == [second]
    assert executor.dead_rank() is None
    _until(lambda: max(executor.heartbeat_ages()) < 2.0)
    assert [1 << 26 < host < 1 << 32 and device == 0 for host, device in executor.memory()] == [True, True]
    assert facts.cache_memory.endswith("free)") or "container" in facts.cache_memory
    pids = _pids(executor)
    assert not list(folder.iterdir()), "what is there while ranks live is left when the server is killed"
    executor.close()
    executor.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not (tmp_path / "seen").exists()
    for number, pid in enumerate(pids):
        assert f"rank {number} started: process {pid}" in caplog.text
        assert re.search(rf"rank {number} ended after [\d.]+ s: by the server \(process {pid}\)", caplog.text)
    assert not abandoned(before)
    (record,) = [record for record in caplog.records if "kernels" in record.getMessage()]
    assert (record.levelname, record.name, record.rank) == ("WARNING", "serve.worker.computing", 0), "one rank says it for all"
    assert "/dev/null/cache/kernels" in record.getMessage()
    assert "TESSERA_CACHE_DIR" in record.getMessage()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_step_and_is_named(started: RankExecutor, victim: int) -> None:
    started.execute(_plan(0))
    os.kill(_pids(started)[victim], signal.SIGKILL)
    # Until then the other one, if it has had no turn for two seconds, counts as frozen.
    _until(lambda: f"rank {victim} died" in str(started.dead_rank()))
    message = started.dead_rank()
    assert message is not None
    assert f"rank {victim} died" in message
    assert loss_reason(message) == "died"
    assert "SIGKILL" in message
    with pytest.raises(ExecutorDied):
        started.execute(_plan(1))


def test_ranks_are_killed_for_memory_before_their_server(started: RankExecutor) -> None:
    server, *ranks = (int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (os.getpid(), *_pids(started)))
    assert ranks == [min(1000, server + 300)] * 2


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
    # The other one, if it has had no turn for two seconds, is frozen too for as long as that lasts.
    _until(lambda: f"rank {victim} is frozen" in str(started.dead_rank()))
    assert loss_reason(started.dead_rank()) == "frozen"
    pids = _pids(started)
    started.close()
    waiting.join(timeout=PATIENCE_SECONDS)
    assert len(outcome) == 1
    assert not any(psutil.pid_exists(pid) for pid in pids)


class Undying(subprocess.Popen[bytes]):
    """A process that waits in the kernel, where no signal reaches it."""

    def __init__(self) -> None:
        self.pid, self.returncode = 0, None

    def poll(self) -> None:
        return None

    def kill(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        raise subprocess.TimeoutExpired("rank", timeout or 0.0)


def test_a_rank_that_cannot_be_killed_keeps_neither_the_step_nor_the_server(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor = RankExecutor(_config(model))
    pairs = [(socket.socketpair(), socket.socketpair(), socket.socketpair()) for _ in range(2)]
    for number, ((steps, _), (orders, _), (pulse, _)) in enumerate(pairs):
        vitals, output = Vitals(number, 0, pulse, 0.0), RankOutput("serve.rank", number)
        output.handed_over()  # to nobody: its thread ends
        executor._ranks.append(Rank(number, Undying(), steps, orders, pulse, 0.0, vitals, output, 0))
    outcome: list[BaseException] = []

    def wait_for_ever() -> None:
        try:
            executor.execute(_plan(0))
        except ExecutorDied as error:
            outcome.append(error)

    waiting = threading.Thread(target=wait_for_ever, daemon=True)
    waiting.start()
    assert wire.receive(pairs[1][0][1]), "the plan has come, and the step waits for its answer"
    executor.close()
    waiting.join(timeout=PATIENCE_SECONDS)
    assert len(outcome) == 1
    assert caplog.text.count("was killed and does not end") == 2
    for pair in pairs:
        for _, theirs in pair:
            theirs.close()


@contextmanager
def _starting(executor: RankExecutor) -> Iterator[None]:
    """The ranks load on a thread of their own; at the end they are closed, which ``start`` says."""
    raised: list[BaseException] = []

    def start() -> None:
        try:
            executor.start()
        except RankStartError as error:
            raised.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    try:
        yield
    finally:
        executor.close()
        thread.join(timeout=PATIENCE_SECONDS)
    assert len(raised) == 1


def test_a_rank_that_is_frozen_while_it_loads_is_noticed(model: Path) -> None:
    executor = RankExecutor(_config(model, stalled_seconds=2.0))
    with _starting(executor):
        _until(lambda: len(executor._ranks) == 2)
        os.kill(_pids(executor)[1], signal.SIGSTOP)
        _until(lambda: "rank 1 is frozen while the model is loaded" in str(executor.dead_rank()))


@pytest.mark.parametrize("moment", ["before it was configured", "while it loads"])
def test_what_killed_a_rank_that_starts_is_told_though_its_connection_goes_first(
    model: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The kernel closes a dead process's sockets before the process can be collected: the first look finds it alive."""
    executor = RankExecutor(_config(model, size=1))

    def kill(rank: Rank) -> None:
        monkeypatch.setattr(rank.process, "poll", lambda: rank.process.returncode)  # nothing collects it but a wait
        os.kill(rank.process.pid, signal.SIGKILL)
        _until(lambda: psutil.Process(rank.process.pid).status() == psutil.STATUS_ZOMBIE)

    send = wire.send

    def send_to_the_dead(end: socket.socket, payload: bytes) -> None:
        if moment == "before it was configured":
            kill(executor._ranks[0])
        send(end, payload)
        if moment == "while it loads":
            kill(executor._ranks[0])

    monkeypatch.setattr(wire, "send", send_to_the_dead)
    with pytest.raises(RankStartError, match="rank 0 ended while it started: signal SIGKILL"):
        executor.start()


def _sabotage(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Have every rank run a program of the test's when it begins."""
    (folder / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_load_that_hangs_is_noticed_though_the_heart_beats(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import sys, time

def never_answer(event, args):
    if event == "open" and str(args[0]).endswith(".safetensors"):
        time.sleep(3600)

sys.addaudithook(never_answer)
"""
    _sabotage(tmp_path, monkeypatch, program)
    executor = RankExecutor(_config(model, size=1, stalled_seconds=2.0))
    with _starting(executor):
        # And not frozen, which it would be called while its heart has no turn to beat.
        _until(lambda: "rank 0 hangs while the model is loaded" in str(executor.dead_rank()))
        assert loss_reason(executor.dead_rank()) == "start"


def test_a_rank_that_hangs_in_a_step_is_told_from_those_that_wait_for_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import signal, time\nsignal.signal(signal.SIGUSR2, lambda *_: time.sleep(3600))\n"
    _sabotage(tmp_path, monkeypatch, program)
    outcome: list[BaseException] = []

    def wait_for_ever() -> None:
        try:
            executor.execute(_plan(1))
        except ExecutorDied as error:
            outcome.append(error)

    with contextlib.closing(RankExecutor(_config(model))) as executor:
        executor.start()
        executor.execute(_plan(0))
        os.kill(_pids(executor)[1], signal.SIGUSR2)
        waiting = threading.Thread(target=wait_for_ever)
        waiting.start()
        _until(lambda: executor.hanging_rank() == 1)
        assert executor.dead_rank() is None, "its heart beats"
    waiting.join(timeout=PATIENCE_SECONDS)
    assert len(outcome) == 1


def test_what_a_rank_finds_wrong_is_a_configuration_error(model: Path, tmp_path: Path, starter: ForkStarter) -> None:
    short = tmp_path / "short"
    shutil.copytree(model, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match=r"layers\.2"):
        RankExecutor(_config(short), starter).start()


@pytest.mark.parametrize(
    ("change", "told", "said"),
    [
        ({}, {"tensor_parallel_size": 5}, "1, 2, 3, 4"),
        ({"model_type": "bert"}, {}, "gpt_neo, gpt_neox"),
        ({}, {"max_model_len": 4096}, "max_model_len is 4096; the model has 512"),
    ],
)
def test_a_rank_finds_what_cannot_be_served_before_it_meets_the_others(
    model: Path, tmp_path: Path, change: dict[str, str], told: dict[str, int], said: str
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    wanted = dataclasses.replace(_config(folder, size=1).model, **told)

    def meet() -> Ranks:
        raise AssertionError("the others were waited for")

    with pytest.raises(ConfigError, match=said):
        load_rank(dataclasses.replace(_config(folder), model=wanted), 0, torch.device("cpu"), meet, Stopwatch())


def test_a_model_whose_numbers_are_not_finite_is_refused_by_every_rank_before_it_is_ready(
    tmp_path: Path, starter: ForkStarter
) -> None:
    spoiled = build("gpt_neox")
    with torch.no_grad():  # in the second rank's part of a row-parallel layer
        spoiled.get_parameter("gpt_neox.layers.1.attention.dense.weight")[3, -1] = math.nan
    spoiled.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"layers\.1\.attention\.dense\.weight.*NaN or infinite"):
        RankExecutor(_config(tmp_path), starter).start()


def test_ranks_talk_as_much_as_their_server_and_end_with_the_thread_that_started_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    with contextlib.closing(executor):
        thread.start()
        thread.join()
        (told,) = [record for record in caplog.records if record.getMessage().startswith("building the CPU kernels")]
        assert (told.levelname, told.rank) == ("INFO", 0)
        assert f"(some seconds, once; kept in {tmp_path}" in told.getMessage()
        [pid] = _pids(executor)
        _until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
