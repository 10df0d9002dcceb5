"""The test server as a process that tells what messages cost it: ``python -m tests.serve.rpc.message_server``.

It prints its address, and for every line on standard input a line of JSON about the time since the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PATIENCE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Cost:
    """What a server went through since it was last asked."""

    hold_seconds: float
    """Longest time on the processor that one callback kept the event loop's thread."""
    peak_bytes: int
    """Most memory at any moment beyond what was held at the beginning."""
    held_bytes: int
    """Memory held now."""
    num_lives: int
    """How often the ranks were started."""
    num_internal: int
    """Calls that ended with INTERNAL or UNKNOWN."""


@dataclass(frozen=True, slots=True)
class MessageServer:
    """The process, seen from outside."""

    address: str
    _process: subprocess.Popen[str]

    def cost(self) -> Cost:
        """What was since the last call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Cost(*json.loads(self._process.stdout.readline()))

    def kill(self) -> None:
        """End it by SIGKILL: its calls are answered no more, its port by nobody."""
        self._process.kill()
        self._process.wait(PATIENCE_SECONDS)


@contextlib.contextmanager
def message_server() -> Iterator[MessageServer]:
    """Start one, and end it."""
    command = [sys.executable, "-m", "tests.serve.rpc.message_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield MessageServer(process.stdout.readline().strip(), process)
        finally:
            process.stdin.close()
            process.wait(PATIENCE_SECONDS)


class Holds:
    """Measures every callback of the event loop by the processor time of the thread."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self._forgets = False
        self._run: Callable[[asyncio.Handle], None] = asyncio.Handle._run  # type: ignore[attr-defined]

    def forget(self) -> None:
        """Begin anew after the callback that is running, which is not the server's."""
        self._forgets = True

    def watch(self) -> None:
        holds, run = self, self._run

        def measured(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            run(handle)
            holds.longest_seconds = max(holds.longest_seconds, time.thread_time() - began)
            if holds._forgets:
                holds.longest_seconds, holds._forgets = 0.0, False

        asyncio.Handle._run = measured  # type: ignore[attr-defined]


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _forget_peak() -> int:
    """Give back what is free, and let the peak begin anew. Returns what is held."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


async def _main() -> None:
    from serve.app import prepare_process
    from tests.serve.rpc.running import serving

    prepare_process()
    holds = Holds()
    async with serving() as server:
        # The test is not in this process, but the fixture's own channel is.
        print(server.address, flush=True)
        base = _forget_peak()
        holds.watch()
        while await asyncio.to_thread(sys.stdin.readline):
            longest, peak = holds.longest_seconds, _memory("VmHWM")
            counts = [
                sample.value
                for family in server.metrics.registry.collect()
                for sample in family.samples
                if sample.name == "tessera_requests_total" and sample.labels["code"] in ("INTERNAL", "UNKNOWN")
            ]
            held = _forget_peak()
            print(json.dumps([longest, peak - base, held, len(server.lives), int(sum(counts))]), flush=True)
            base = held
            holds.forget()


if __name__ == "__main__":
    asyncio.run(_main())
