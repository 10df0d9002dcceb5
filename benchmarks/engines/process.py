"""An engine in a process of its own, as the benchmark sees it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.engines.environments import Unavailable
from benchmarks.engines.peers import Start, usable_cores

ROOT: Final = Path(__file__).resolve().parents[2]
START_SECONDS: Final = 300.0
ANSWER_SECONDS: Final = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine generated, and for how long by its own clock."""

    seconds: float
    ids: list[list[int]]


class EngineProcess:
    """Starts an engine and waits until it is ready; raises ``Unavailable`` with what it said when it is not, or ends."""

    def __init__(self, start: Start, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log, self._rest = log, b""
        settings = {"threads": usable_cores(), **start.settings}
        environment = {**os.environ, "OMP_NUM_THREADS": str(usable_cores()), "HF_HUB_OFFLINE": "1"}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(start.python), "-m", start.module, json.dumps(settings)], cwd=ROOT, env=environment, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
            )  # fmt: skip
        try:
            self.versions: dict[str, str] = self._read(START_SECONDS)["versions"]
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: list[list[int]], tokens: int, exact: bool = False, every: float = 0.0) -> Answer:
        """So many greedy tokens after each prompt, all submitted at once, or one ``every`` so many seconds.

        Raises ``Unavailable`` when the engine fails, or gives another number of tokens.
        """
        assert self._process.stdin is not None
        try:
            request = {"prompts": prompts, "tokens": tokens, "exact": exact, "every": every}
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Unavailable(f"it ended: {self._last_words()}") from None
        said = self._read(ANSWER_SECONDS)
        lengths = {len(ids) for ids in said["ids"]}
        if len(said["ids"]) != len(prompts) or lengths != {tokens}:
            raise Unavailable(f"{len(said['ids'])} answers of {sorted(lengths)} tokens for {len(prompts)} of {tokens}")
        return Answer(said["seconds"], said["ids"])

    def _read(self, seconds: float) -> dict[str, Any]:
        """The next line that it says."""
        assert self._process.stdout is not None
        until = time.monotonic() + seconds
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise Unavailable(f"nothing came for {seconds:.0f} s: {self._last_words()}")
            piece = os.read(self._process.stdout.fileno(), 1 << 20)
            if not piece:
                raise Unavailable(f"it ended: {self._last_words()}")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise Unavailable(said["error"])
        return said

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return " | ".join([line.strip() for line in lines if line.strip()][-2:]) or "it said nothing"

    def close(self) -> None:
        """End it, and what it started."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
