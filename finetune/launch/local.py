"""Starts the ranks of a run on this machine, watches them, and ends them: none is left, however the run ends."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from finetune.config import TuneConfig
from finetune.errors import FinetuneError, RankDied, RunError
from finetune.launch.common import claimed_run, saying
from finetune.launch.instructions import Command, Instructions, RunFile, encoded
from finetune.launch.prerequisites import make_ready
from finetune.machine import inventory
from finetune.machine.process import rank_environment
from finetune.observe.outside import observed
from host.limits import killed_for_memory, memory_kills
from host.modules import import_path, module_command

_GRACE_SECONDS = 5.0
"""After one rank died, time for the others to notice by themselves and to write down what they saw."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one rank's process ended, and what it had to say about it."""

    rank: int
    code: int
    """Exit code as ``subprocess`` gives it: negative is a signal."""
    reason: Mapping[str, Any] | None
    """What the rank left behind, if it could."""


def train(config: TuneConfig, console: Console, *, command: Command, anyway: bool) -> int:
    """Start the ranks of a run here, prepare its data while they import, and wait for them; returns the exit code.

    Raises:
        FinetuneError: what was wrong; no rank is left.
    """
    say = saying(console)
    with ExitStack() as stack:
        run = stack.enter_context(claimed_run(config, say))
        file = RunFile(config=run.config, command=command, anyway=anyway)
        ranks = stack.enter_context(RankProcesses(run.output, file, ranks=config.run.ranks, threads=config.run.threads))
        ranks.go(make_ready(run.config, say, ranks.check, swap=run.swap))
        with observed(run.config, ranks.process_ids, console):
            ranks.wait()
        return 1 if ranks.interrupted is signal.SIGINT else 0


class RankProcesses:
    """The rank processes of one run. Use as a context manager: leaving it kills what still runs.

    Created and used by the main thread alone, which also handles the signals: the kernel kills the ranks when the
    thread that started them ends.
    """

    def __init__(self, output: Path, run: RunFile, *, ranks: int, threads: int | None) -> None:
        self._logs = output / "logs"
        shutil.rmtree(self._logs, ignore_errors=True)
        self._logs.mkdir(parents=True)
        run_file = output / "run.json"
        run.write(run_file)
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.interrupted: signal.Signals | None = None
        self._forced = False
        self._training = False
        self._kills_before = memory_kills()
        self._handlers: dict[signal.Signals, Any] = {}
        try:
            self._start(run_file, ranks, threads or max(1, inventory.usable_cores() // ranks))
        except BaseException:
            self.__exit__()
            raise

    def _start(self, run_file: Path, ranks: int, threads: int) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, self._on_signal)
        console = os.dup(sys.stdout.fileno())
        try:
            environment = _environment(ranks, threads, console)
            for rank in range(ranks):
                with (self._logs / f"rank-{rank}.log").open("wb") as log:
                    process = subprocess.Popen(
                        [*module_command("finetune.launch.rank"), str(run_file)],
                        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        pass_fds=(console,) if rank == 0 else (),
                        start_new_session=True,  # Ctrl-C reaches the launcher alone, which tells all ranks at once
                    )
                self._processes.append(process)
                threading.Thread(target=self._wait_for, args=(rank, process), daemon=True).start()
        finally:
            os.close(console)

    def _wait_for(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        file = self._logs / f"rank-{rank}.error.json"
        try:
            reason = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            reason = None
        self._ended.put(Ended(rank, code, reason))

    @property
    def process_ids(self) -> list[int]:
        """The process ids of the ranks, in the order of their numbers; those of ranks that have ended among them."""
        return [process.pid for process in self._processes]

    # -- signals

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = self.interrupted is not None
        self.interrupted = signal.Signals(number)
        if again or not self._training:
            self._forced = self._training
            self._kill()  # nothing to save yet, or the second request: at once
            return
        for process in self._processes:
            process.send_signal(signal.SIGTERM)

    # -- the run

    def check(self) -> None:
        """Raise what ended a rank already, or the stop that was asked for; return at once if all is well."""
        self._stop_if_interrupted()
        if any(process.poll() not in (None, 0) for process in self._processes):
            self.wait()

    def _stop_if_interrupted(self) -> None:
        if self.interrupted is not None and not self._training:
            raise RunError(f"stopped by {self.interrupted.name} before training began")

    def go(self, told: Instructions) -> None:
        """Send every rank its instructions, on which it begins to train. From now on a stop is one with a save.

        Raises:
            RunError: a stop was asked for before.
        """
        self._stop_if_interrupted()
        line = encoded(told) + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.close()
            except BrokenPipeError:  # it has ended; wait() says why
                pass
        self._training = True

    def wait(self) -> None:
        """Wait until all ranks have ended.

        Raises:
            FinetuneError: the cause, with its exit code, when any rank failed; all ranks have ended by then.
        """
        ended: list[Ended] = []
        deadline: float | None = None
        while len(ended) < len(self._processes):
            try:
                ended.append(self._ended.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                break
            if ended[-1].code != 0 and deadline is None:
                deadline = time.monotonic() + _GRACE_SECONDS
        self._kill()
        failed = [rank for rank in ended if rank.code != 0]
        self._stop_if_interrupted()
        if self._forced:
            raise RunError("stopped at once, without a save; --resume goes on from the last one")
        if failed:
            raise self._cause(failed)

    def _cause(self, failed: list[Ended]) -> FinetuneError:
        """The first thing that went wrong: a signal before an error, a rule of ours before the echo on other ranks."""
        killed = [rank for rank in failed if rank.code < 0]
        if killed:
            rank, number = killed[0].rank, -killed[0].code
            said = "" if number == signal.SIGKILL else f": {self._last_lines(rank)}"
            how = killed_for_memory(self._kills_before) if number == signal.SIGKILL else None
            return RankDied(f"rank {rank} {f'was {how}' if how else _signal_text(number)}{said}; its log: {self._log(rank)}")
        told = [(rank.rank, rank.reason) for rank in failed if rank.reason]
        if told:
            rank, reason = min(told, key=lambda each: (not each[1]["expected"], each[1]["time"]))
            error = RankDied(f"rank {rank}: {reason['message']}; its log: {self._log(rank)}")
            if reason["expected"]:
                error = RankDied(str(reason["message"]))
                error.told = True
            error.exit_code = int(reason["exit_code"])
            return error
        rank = failed[0].rank
        return RankDied(f"rank {rank} ended with code {failed[0].code}: {self._last_lines(rank)}; its log: {self._log(rank)}")

    def _last_lines(self, rank: int) -> str:
        return " / ".join(self._log(rank).read_text(errors="replace").strip().splitlines()[-3:]) or "it said nothing"

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank-{rank}.log"

    # -- the end

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        for process in self._processes:
            process.wait()
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def _signal_text(number: int) -> str:
    name = signal.Signals(number).name
    if number == signal.SIGKILL:
        return "was killed (SIGKILL): by hand, or by the system because memory ran out (see dmesg; tessera-finetune doctor)"
    return f"was ended by {name}"


def _environment(ranks: int, threads: int, console: int) -> dict[str, str]:
    """What every rank inherits."""
    environment = {**os.environ, **rank_environment(ranks, threads), "TESSERA_CONSOLE_FD": str(console)}
    environment["PYTHONPATH"] = import_path(os.environ)
    if os.isatty(console):
        environment["TESSERA_CONSOLE_WIDTH"] = str(os.get_terminal_size(console).columns)
    return environment
