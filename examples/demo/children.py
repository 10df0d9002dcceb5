"""The programs the demo starts: their output is kept in files, and every process that came of them is stopped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

PR_SET_CHILD_SUBREAPER = 36


class PartFailed(Exception):
    """One part of the demo did not do what it should; ``log`` says what it wrote last."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True, slots=True)
class Child:
    """A running program. Standard output and standard error go to a file each."""

    name: str
    process: subprocess.Popen[bytes]
    out: Path
    log: Path

    def last_line(self) -> str:
        """The newest non-empty line of output or log, for a status display."""
        newest = max((self.out, self.log), key=lambda path: path.stat().st_mtime_ns)
        lines = [line for line in tail(newest, 5) if line.strip()]
        return lines[-1].strip() if lines else ""

    def require_alive(self) -> None:
        """Raise ``PartFailed`` if the program has ended."""
        if (code := self.process.poll()) is not None:
            raise PartFailed(f"{self.name} ended with {describe_exit(code)}", self.log)


class Children:
    """Owns every process the demo starts. Leaving the context stops all of them, whatever happened.

    On Linux this process becomes the reaper of its orphaned descendants, so that a rank whose parent died is still found.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []

    def __enter__(self) -> Children:
        self._logs.mkdir(parents=True, exist_ok=True)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for child in self._children:
            with contextlib.suppress(PartFailed):
                self.stop(child, patience_seconds=15)
        stubborn = self.left_over()
        for process in stubborn:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(stubborn, timeout=5)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def start(self, name: str, argv: list[str]) -> Child:
        """Start a program in a session of its own, so that Ctrl-C reaches it through ``stop`` only."""
        out, log = self._logs / f"{name}.out", self._logs / f"{name}.log"
        with out.open("wb") as stdout, log.open("wb") as stderr:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True)
        child = Child(name, process, out, log)
        self._children.append(child)
        return child

    def stop(self, child: Child, patience_seconds: float) -> int:
        """Ask with SIGTERM, then kill. Returns the exit code.

        Raises:
            PartFailed: it had to be killed.
        """
        if child.process.poll() is None:
            child.process.terminate()
            try:
                child.process.wait(patience_seconds)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()
                raise PartFailed(f"{child.name} did not stop within {patience_seconds:.0f} s of SIGTERM", child.log) from None
        return child.process.returncode

    def left_over(self, patience_seconds: float = 3.0) -> list[psutil.Process]:
        """Descendants that still run; those about to end are given a moment."""
        _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=patience_seconds)
        return alive


def command(name: str, module: str) -> list[str]:
    """The installed command beside this interpreter, or the same program as a module when Tessera is not installed."""
    script = Path(sys.executable).with_name(name)
    return [str(script)] if script.exists() else [sys.executable, "-m", module]


def wait_for_line(child: Child, start: str, timeout_seconds: float) -> str:
    """The first line of the child's standard output that begins with ``start``.

    Raises:
        PartFailed: the child ended first, or took longer than ``timeout_seconds``.
    """
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        for line in child.out.read_text(errors="replace").splitlines(keepends=True):
            if line.startswith(start) and line.endswith("\n"):
                return line.rstrip("\n")
        child.require_alive()
        time.sleep(0.1)
    raise PartFailed(f"{child.name} was not ready within {timeout_seconds:.0f} s", child.log)


def describe_exit(code: int) -> str:
    """``exit code 1`` or ``signal SIGKILL``."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def tail(path: Path, count: int) -> list[str]:
    """The last lines of a file; a progress bar's carriage returns count as line ends."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16_384))
        return file.read().decode(errors="replace").replace("\r", "\n").splitlines()[-count:]
