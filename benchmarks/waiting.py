"""What planning a step ahead is worth: ``python -m benchmarks.waiting``.

Two servers of Pythia-160M's shape, one with ``--async-scheduling`` and one without, take turns at decoding the same prompts,
each streamed over gRPC by one client on the same cores. Their ranks note for how long each plan let them wait. The first token
of one more request, which comes while the others decode, is timed too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.noting import NOTE
from benchmarks.peers import Prompts, TesseraServer
from benchmarks.serving import PROMPT_TOKENS, make_model
from serve.v1 import inference_pb2

_EDGE: Final = 8
"""Steps at the beginning and at the end of a turn that count for nothing: prompts are computed, streams end."""


class Server(TesseraServer):
    """A server with its notes."""

    def __init__(self, model: Path, dtype: str, *, ahead: bool) -> None:
        self._notes = model.parent / f"notes-{ahead}"
        option = "--async-scheduling" if ahead else "--no-async-scheduling"
        super().__init__(model, dtype, "cpu", option, program=("benchmarks.noting", "serve", str(self._notes)))

    def turn(self, prompts: Prompts, tokens: int) -> tuple[float, float, float]:
        """(share of the time that rank 0 waited, seconds of a step, seconds to the first token of a prompt that came later)."""
        began = time.monotonic()
        first = self._loop.run_until_complete(self._all_and_one_later(prompts, tokens))
        notes = [note for note in NOTE.iter_unpack(self._notes.read_bytes()) if note[0] > began][_EDGE:-_EDGE]
        between = [after - before for (before, _), (after, _) in itertools.pairwise(notes)]
        return sum(waited for _, waited in notes[1:]) / sum(between), statistics.median(between), first

    async def _all_and_one_later(self, prompts: Prompts, tokens: int) -> float:
        *most, last = prompts
        streams = asyncio.gather(*(self._stream(prompt, tokens, inference_pb2.Sampling()) for prompt in most))
        await asyncio.sleep(random.uniform(1.0, 2.0))
        began = time.monotonic()
        await self._stream(last, 1, inference_pb2.Sampling())
        seconds = time.monotonic() - began
        await streams
        return seconds


def compare(dtype: str, running: int, tokens: int, turns: int) -> dict[str, object]:
    """Medians over the turns of both servers, and of the ratios of neighbouring turns."""
    source = random.Random(0)
    prompts = [[source.randrange(50_000) for _ in range(PROMPT_TOKENS)] for _ in range(running + 1)]
    with contextlib.ExitStack() as stack:
        model = make_model(Path(stack.enter_context(tempfile.TemporaryDirectory())), dtype)
        servers = {}
        for name, ahead in (("off", False), ("on", True)):
            servers[name] = Server(model, dtype, ahead=ahead)
            stack.callback(servers[name].close)
            servers[name].generate(prompts, 4)
        measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in servers}
        for turn in range(turns):
            for name in ("off", "on") if turn % 2 else ("on", "off"):
                measured[name].append(servers[name].turn(prompts, tokens))
    said: dict[str, object] = {"dtype": dtype, "running": running, "turns": turns}
    for name, rows in measured.items():
        share, step, first = (statistics.median(column) for column in zip(*rows, strict=True))
        said[name] = {
            "rank 0 waits, percent of a step": round(100 * share, 2),
            "ms of a step": round(1000 * step, 2),
            "ms to the first token of one more": round(1000 * first, 1),
        }
    pairs = list(zip(measured["on"], measured["off"], strict=True))
    said["speed, on / off"] = round(statistics.median(off[1] / on[1] for on, off in pairs), 3)
    said["first token of one more, on / off"] = round(statistics.median(on[2] / off[2] for on, off in pairs), 3)
    return said


def main() -> None:
    """Print a line of figures for each number of sequences."""
    parser = argparse.ArgumentParser(description="What planning a step ahead is worth, over gRPC.")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--turns", type=int, default=8)
    options = parser.parse_args()
    for running in options.running:
        print(json.dumps(compare(options.dtype, running, options.tokens, options.turns)), flush=True)


if __name__ == "__main__":
    main()
