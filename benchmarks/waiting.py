"""How much of a step rank 0 waits for the server: ``python -m benchmarks.waiting``.

32 sequences of Pythia-160M's shape decode, with a step planned ahead and without. The rank is this file run as a program, which
notes how long each plan let it wait; the engine is driven directly, so the cost of gRPC is not in the figures.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.peers import _NoText, server_config
from benchmarks.serving import make_model
from serve.engine.engine import Engine, EngineLimits
from serve.types import Generation, RequestId, ResponseOptions, SamplingParams, StoppingParams
from serve.worker import rank_loop, wire
from serve.worker.executor import RankExecutor
from serve.worker.rank_process import NewRank, RankProcess

RUNNING: Final = 32
PROMPT_TOKENS: Final = 64
_NOTE: Final = struct.Struct("dd")
"""When a plan came, and for how long it was waited for."""


class _Noting:
    """Starts the rank as this program, which notes into a file."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes

    def start(self, rank: NewRank, unless: Callable[[], None]) -> RankProcess:
        command = [sys.executable, "-m", "benchmarks.waiting", "--notes", str(self._notes), *rank.words(*rank.descriptors)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=rank.descriptors, env=rank.environment)


def be_rank(notes: Path, words: list[str]) -> None:
    """A rank that notes how long it waits."""
    receive, main_thread = wire.receive, threading.main_thread()
    with notes.open("wb", buffering=0) as file:

        def timed(connection):  # type: ignore[no-untyped-def]
            began = time.monotonic()
            message = receive(connection)
            if threading.current_thread() is main_thread:
                now = time.monotonic()
                file.write(_NOTE.pack(now, now - began))
            return message

        wire.receive = timed
        rank_loop.main(words)


def measure(model: Path, dtype: str, steps: int, *, ahead: bool) -> tuple[float, float]:
    """(share of the time that rank 0 waited, seconds of a step) over so many steps of decoding."""
    notes = model.parent / "notes"
    config = server_config(model, dtype, "cpu")
    executor = RankExecutor(config, _Noting(notes))
    try:
        engine = Engine(
            facts=executor.start(),
            limits=EngineLimits(
                max_num_seqs=RUNNING,
                max_step_tokens=2048,
                max_queued_requests=1024,
                max_queued_tokens=10**6,
                prefix_caching=False,
                async_scheduling=ahead,
            ),
            executor=executor,
            open_text=lambda *_: _NoText(),
            clock=time.monotonic,
        )
        for number in range(RUNNING):
            engine.add(
                Generation(
                    request_id=RequestId(str(number)),
                    prompt_ids=tuple(range(number, number + PROMPT_TOKENS)),
                    sampling=SamplingParams(),
                    stopping=StoppingParams(max_new_tokens=steps + 20, ignore_eos=True),
                    response=ResponseOptions(text=True),
                )
            )
        while engine.has_work:
            engine.step()
    finally:
        executor.close()
    times = list(_NOTE.iter_unpack(notes.read_bytes()))[-steps - 10 : -9]
    seconds = times[-1][0] - times[0][0]
    return sum(waited for _, waited in times[1:]) / seconds, seconds / steps


def main() -> None:
    """Print a line of figures for each way."""
    parser = argparse.ArgumentParser(description="Share of a step in which rank 0 waits for the server.")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.notes is not None:
        be_rank(options.notes, options.words)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), options.dtype)
        for ahead in (False, True, False, True):
            share, seconds = measure(model, options.dtype, options.steps, ahead=ahead)
            print(json.dumps({"ahead": ahead, "waits_percent": round(100 * share, 2), "step_ms": round(1000 * seconds, 2)}))


if __name__ == "__main__":
    main()
