"""A real ``tessera-serve`` in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from serve.v1 import admin_pb2_grpc, inference_pb2_grpc, models_pb2_grpc, tokenizer_pb2_grpc
from serve.worker.rank_loop import RANK_NAME
from tests.support import warm

T = TypeVar("T")

START_SECONDS = 240.0
ROOT = Path(__file__).resolve().parents[2]


class Server:
    """A running server: its addresses, its stubs, its metrics, its processes."""

    def __init__(self, process: subprocess.Popen[str] | warm.Program, ready: dict[str, str], log: list[str]) -> None:
        self.process = process
        self.log = log
        """Lines of its standard error so far."""
        self.address = ready["grpc"]
        self.metrics_url = ready["metrics"]
        self.ready = ready
        self.channel = grpc.insecure_channel(self.address)
        self.inference = inference_pb2_grpc.InferenceStub(self.channel)
        self.tokenizer = tokenizer_pb2_grpc.TokenizerStub(self.channel)
        self.models = models_pb2_grpc.ModelsStub(self.channel)
        self.admin = admin_pb2_grpc.AdminStub(self.channel)
        self.health_stub = health_pb2_grpc.HealthStub(self.channel)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics: ``name{label="value"}`` to its value, without the name of the model that each one bears."""
        # A direct opener: a proxy in the environment has no business with loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.metrics_url, timeout=240) as answer:
            text = answer.read().decode()
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()) if key != "model_name")
                samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return samples

    def health(self) -> str:
        """``SERVING`` or ``NOT_SERVING``."""
        answer = self.health_stub.Check(health_pb2.HealthCheckRequest(service="serve.v1.Inference"), timeout=240)
        name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        return name

    def rank_pids(self) -> list[int]:
        """The ranks' processes, rank 0 first."""
        ranks = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                name = Path(f"/proc/{child.pid}/comm").read_text().strip()
            except (FileNotFoundError, ProcessLookupError):  # it has ended since, before it was opened or before it was read
                continue
            if name.startswith(RANK_NAME):
                ranks[int(name.removeprefix(RANK_NAME))] = child.pid
        return [ranks[number] for number in sorted(ranks)]

    def stop(self) -> int:
        """Ask the server to end; returns its exit code."""
        self.channel.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=400)


def lives(pid: int) -> bool:
    """Whether a process runs; what has ended and waits for its parent to see it does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], T], seconds: float = 400.0, every: float = 0.02) -> T:
    """Wait for a condition to come true; its first true value."""
    deadline = time.monotonic() + seconds
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"the condition did not come true within {seconds} s"
        time.sleep(every)


@contextmanager
def started(
    model: Path, *options: str, device: str = "cpu", under: Sequence[str] = (), program: Sequence[str] = ("serve",)
) -> Iterator[tuple[subprocess.Popen[str] | warm.Program, list[str]]]:
    """Start ``python -m serve`` on free ports; its process and its log so far. What still runs at the end is killed.

    It is forked, see ``tests.support.warm``, where that makes no difference.

    Args:
        under: words before the command: a program that becomes the server.
        program: the module that is run and what it is told first, for one that becomes the server in its own way.
    """
    module, *first = program
    words = [*first, "--model", str(model), "--port", "0", "--metrics-port", "0", "--device", device, *options]
    process: subprocess.Popen[str] | warm.Program
    if under or device != "cpu" or not warm.can_fork(os.environ):
        process = subprocess.Popen(
            [*under, sys.executable, "-m", module, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    else:
        process = warm.start(module, words)
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=_collect, args=(process.stderr, log), daemon=True)
    reader.start()
    try:
        yield process, log
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reader.join()
        process.stdout.close()
        process.stderr.close()


@contextmanager
def serving(
    model: Path,
    *options: str,
    device: str = "cpu",
    exit_code: int = 0,
    under: Sequence[str] = (),
    program: Sequence[str] = ("serve",),
) -> Iterator[Server]:
    """``started``, and waited for until it is ready; it is stopped at the end and must end with ``exit_code``."""
    with started(model, *options, device=device, under=under, program=program) as (process, log):
        assert process.stdout is not None
        watchdog = threading.Timer(START_SECONDS, process.kill)
        watchdog.start()
        try:
            line = process.stdout.readline()
        finally:
            watchdog.cancel()
        assert line.startswith("tessera ready "), f"no ready line but {line!r}; its log:\n{''.join(log)}"
        server = Server(process, dict(word.split("=", 1) for word in line.split()[2:]), log)
        yield server
        assert server.stop() == exit_code, f"the server ended badly; its log:\n{''.join(log)}"


def _collect(stream: IO[str], lines: list[str]) -> None:
    for line in stream:
        lines.append(line)
