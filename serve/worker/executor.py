"""The ranks as the engine sees them: started, fed with plans, watched, ended."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgpack

from serve.config import ServerConfig
from serve.engine.executor import ExecutorDied, ModelFacts
from serve.engine.plan import StepPlan, StepResult
from serve.errors import ConfigError, RankStartError
from serve.worker import wire
from serve.worker.rank_loop import READY

_REAP_SECONDS: Final = 10.0


@dataclass(slots=True)
class _Rank:
    """One rank's process and our ends of its two sockets."""

    number: int
    process: subprocess.Popen[bytes]
    steps: socket.socket
    pulse: socket.socket
    heard: float
    """Monotonic time of its last heartbeat."""


class RankExecutor:
    """A group of ranks that live and die together.

    ``start`` and ``execute`` belong to one thread; ``heartbeat_ages``, ``dead_rank`` and ``close`` may be called from another.
    The thread that calls ``start`` must outlive the ranks: the kernel ends them with it.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._ranks: list[_Rank] = []
        self._folder: Path | None = None
        self._closed = False
        self._lock = threading.Lock()

    def start(self) -> ModelFacts:
        """Start the ranks and wait until every one has loaded its part.

        Raises:
            ConfigError: the checkpoint or an option is at fault, or there is no folder for temporary files.
            RankStartError: a rank failed, took longer than ``supervisor.start_timeout_seconds``, or ``close`` was called.
        """
        size = self._config.model.tensor_parallel_size
        # A fresh private folder: the ranks meet through a file in it, so no port is opened.
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="tessera-"))
        except OSError as error:
            raise ConfigError(
                f"the ranks need a folder to meet in: {error.strerror or error}; set TMPDIR to one that can be written"
            ) from error
        try:
            for number in range(size):
                with self._lock:
                    if self._closed:
                        raise RankStartError("the ranks were stopped while they started")
                    rank = self._spawn(number, size)
                    self._ranks.append(rank)
                wire.send(rank.steps, wire.encode_record(self._config))
            return self._wait_until_ready()
        except wire.ConnectionLost as error:
            self.close()
            raise RankStartError(f"a rank ended while it started: {error}") from error
        except BaseException:
            self.close()
            raise

    def _spawn(self, number: int, size: int) -> _Rank:
        assert self._folder is not None
        ours, theirs = socket.socketpair()
        our_pulse, their_pulse = socket.socketpair()
        with theirs, their_pulse:
            command = [
                sys.executable,
                "-m",
                "serve.worker.rank_loop",
                str(number),
                str(theirs.fileno()),
                str(their_pulse.fileno()),
                str(self._folder / "rendezvous"),
                logging.getLevelName(logging.getLogger("serve").getEffectiveLevel()),
            ]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(theirs.fileno(), their_pulse.fileno()),
                env=rank_environment(number, size, self._config.model.device),
            )
        our_pulse.setblocking(False)
        return _Rank(number, process, ours, our_pulse, time.monotonic())

    def _wait_until_ready(self) -> ModelFacts:
        deadline = time.monotonic() + self._config.supervisor.start_timeout_seconds
        facts: dict[int, ModelFacts] = {}
        failures: list[tuple[str, str]] = []
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.steps, selectors.EVENT_READ, rank)
            while len(facts) < len(self._ranks) and not failures:
                ready = selector.select(timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise RankStartError(
                        f"the ranks were not ready within {self._config.supervisor.start_timeout_seconds:.0f} s"
                    )
                for key, _ in ready:
                    rank = key.data
                    selector.unregister(rank.steps)
                    try:
                        kind, *rest = msgpack.unpackb(wire.receive(rank.steps))
                    except wire.ConnectionLost:
                        failures.append(("rank", f"rank {rank.number} ended while it started: {_how_it_ended(rank.process)}"))
                        continue
                    if kind == READY:
                        facts[rank.number] = wire.decode_record(rest[0], ModelFacts)
                    else:
                        failures.append((rest[0], rest[1]))
        if failures:
            # A configuration error explains the others' deaths, not the other way round.
            kind, message = min(failures, key=lambda failure: failure[0] != "config")
            raise (ConfigError if kind == "config" else RankStartError)(message)
        return facts[0]

    def execute(self, plan: StepPlan) -> StepResult:
        """Send one plan to every rank and wait for rank 0's result.

        Raises:
            ExecutorDied: a rank is gone, or ``close`` was called meanwhile.
        """
        payload = wire.encode_plan(plan)
        try:
            for rank in self._ranks:
                wire.send(rank.steps, payload)
            result = wire.decode_result(wire.receive(self._ranks[0].steps))
        except (wire.ConnectionLost, IndexError) as error:
            raise ExecutorDied(self.dead_rank() or f"the ranks' connection was lost: {error}") from error
        if result.step != plan.step:
            raise ExecutorDied(f"step {plan.step} was answered by step {result.step}")
        return result

    def heartbeat_ages(self) -> tuple[float, ...]:
        """Seconds since each rank was last heard of."""
        with self._lock:
            now = time.monotonic()
            for rank in self._ranks:
                with contextlib.suppress(BlockingIOError, OSError):
                    while rank.pulse.recv(4096):
                        rank.heard = now
            return tuple(now - rank.heard for rank in self._ranks)

    def dead_rank(self) -> str | None:
        """A sentence about a rank that is gone or frozen; ``None`` while all are well."""
        with self._lock:
            if self._closed:
                return "the ranks were stopped"
            for rank in self._ranks:
                if rank.process.poll() is not None:
                    return f"rank {rank.number} died: {_how_it_ended(rank.process)}"
        limit = self._config.supervisor.heartbeat_timeout_seconds
        for number, age in enumerate(self.heartbeat_ages()):
            if age > limit:
                return f"rank {number} is frozen: no heartbeat for {age:.1f} s"
        return None

    def dump_stacks(self) -> None:
        """Ask every rank to print the stacks of its threads on stderr."""
        with self._lock:
            for rank in self._ranks:
                if rank.process.poll() is None:
                    rank.process.send_signal(signal.SIGUSR1)

    def close(self) -> None:
        """Kill what lives, collect it, and give everything back. Once is enough, twice does no harm."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for rank in self._ranks:
                if rank.process.poll() is None:
                    rank.process.kill()  # also ends a frozen one
            for rank in self._ranks:
                rank.process.wait(timeout=_REAP_SECONDS)
                # shutdown, not only close: a thread that waits in ``execute`` must wake up.
                for end in (rank.steps, rank.pulse):
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
                    end.close()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)


def rank_environment(number: int, size: int, device: str) -> dict[str, str]:
    """The rank's environment: ours, and its fair share of the cores, loopback only, nothing fetched."""
    cores = len(os.sched_getaffinity(0))
    on_cpu = device == "cpu"
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(max(1, cores // size)),
        # Threads that wait for one another spin for some ten microseconds and then sleep. Without a bound a spinning thread
        # keeps the one it waits for from running (steps thirty times as long on a busy machine); without any spin each
        # linear layer pays for waking them (twice as long at one row).
        "GOMP_SPINCOUNT": "20000",
        # Weights and KV blocks on two-mebibyte pages: reading all weights per token is a fifth faster.
        "THP_MEM_ALLOC_ENABLE": "1",
        "LOCAL_RANK": str(number),
        **({"DS_ACCELERATOR": "cpu"} if on_cpu else {}),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")))
        ),
    }


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    code = process.poll()
    if code is None:
        return "it closed its connection"
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
