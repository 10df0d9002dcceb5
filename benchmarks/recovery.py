"""Seconds for which streams stand still when a rank is killed: ``python -m benchmarks.recovery``; two minutes.

A server on two ranks has a few greedy streams. Again and again one rank gets SIGKILL at some moment of a step; what counts is
the time from there until the first and until the last of the streams has its next token, and for how much of it the ranks read
weights, by the server's own figure. The bar is for all but the reading. Each stream must give, token for token, what it gave
before anybody was killed: none is lost, and none begins anew.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from benchmarks.guarded import make_model
from benchmarks.load_server import load_seconds, ranks_of, serving
from benchmarks.pretrained import without_progress_bars
from benchmarks.sampling import small_model
from benchmarks.serving import RESULTS, machine
from serve.client.results import Delta
from serve.client.sync import Client

BAR: Final = 0.8
"""Seconds beside reading the weights, of the median kill."""
RANKS: Final = 2
TOKENS: Final = 900
SHAPES: Final[dict[str, Callable[[Path], Path]]] = {
    "4 layers of 256 features": small_model,
    "Pythia-160M, but for its vocabulary": lambda folder: make_model(folder, hidden=768),
}


class Stream:
    """One stream after another of the same prompt; when each token came."""

    def __init__(self, address: str, number: int) -> None:
        self._client = Client(address, timeout=600.0)
        self._prompt = [(7919 * number + place) % 8000 for place in range(16)]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.last_seconds = 0.0
        self.answers: list[tuple[int, ...]] = []
        self.failures: list[str] = []
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                ids: list[int] = []
                for event in self._client.stream(self._prompt, max_new_tokens=TOKENS, ignore_eos=True):
                    if isinstance(event, Delta) and event.token_ids:
                        ids.extend(event.token_ids)
                        self.last_seconds = time.perf_counter()
                self.answers.append(tuple(ids))
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    def said_since(self, moment: float) -> bool:
        """Whether a token came after it; raises where the stream has failed instead."""
        if self.failures:
            raise RuntimeError(self.failures[0])
        return self.last_seconds > moment

    def end(self) -> None:
        """Wait until the answer under way is there."""
        self._over.set()
        self._thread.join()
        self._client.close()


def wait_for(streams: list[Stream], moment: float, *, whom: Callable[[Iterable[bool]], bool]) -> float:
    """Seconds until any, or all, of the streams have said something since."""
    while not whom(stream.said_since(moment) for stream in streams):
        time.sleep(0.002)
    return time.perf_counter() - moment


def killed(model: Path, kills: int, num_streams: int) -> dict[str, Any]:
    """Kill ranks of a server, and tell what its streams saw."""
    draw, turns = random.Random(0), []
    with serving(model, RANKS, "float32", ["--kv-cache-gib", "0.5"]) as served:
        reference = [Stream(served.grpc, number) for number in range(num_streams)]
        for stream in reference:
            stream.end()
        streams = [Stream(served.grpc, number) for number in range(num_streams)]
        wait_for(streams, 0.0, whom=all)
        for _ in range(kills):
            time.sleep(0.5 + draw.random())
            victim = draw.choice(ranks_of(served.process))
            moment = time.perf_counter()
            os.kill(victim, signal.SIGKILL)
            # Tokens that were on their way come in the same moment; those of the new ranks cannot.
            while victim in ranks_of(served.process) or len(ranks_of(served.process)) < RANKS:
                time.sleep(0.002)
            back = time.perf_counter()
            begun = back - moment
            first, last = (begun + wait_for(streams, back, whom=whom) for whom in (any, all))
            turns.append((begun, first, last, load_seconds(served.metrics)["weights"]))
        for stream in streams:
            stream.end()
    begun_s, first_s, last_s, weights_s = ([turn[place] for turn in turns] for place in range(4))
    beside = [turn[1] - turn[3] for turn in turns]
    right = {stream.answers[0] for stream in reference}
    answers = [answer for stream in streams for answer in stream.answers]
    return {
        "kills": len(turns),
        "streams": num_streams,
        "seconds to new ranks' processes": round(statistics.median(begun_s), 3),
        "seconds to the first stream's next token": round(statistics.median(first_s), 3),
        "the longest": round(max(first_s), 3),
        "seconds to the last stream's": round(statistics.median(last_s), 3),
        "seconds of reading weights": round(statistics.median(weights_s), 3),
        "beside reading": round(statistics.median(beside), 3),
        "beside reading, the longest": round(max(beside), 3),
        "answers": len(answers),
        "answers that differ": sum(answer not in right for answer in answers),
        "streams lost": sum(bool(stream.failures) for stream in streams),
    }


def main() -> int:
    """Kill, print and record; 1 where the bar is missed or a stream is."""
    parser = argparse.ArgumentParser(description="Seconds for which streams stand still when a rank is killed.")
    parser.add_argument("--kills", type=int, default=20, help="of each shape (20)")
    parser.add_argument("--streams", type=int, default=4, help="that run meanwhile (4)")
    parser.add_argument("--no-record", action="store_true", help="write no result file")
    options = parser.parse_args()
    without_progress_bars()
    shapes: dict[str, Any] = {}
    for name, make in SHAPES.items():
        with tempfile.TemporaryDirectory() as scratch:
            shapes[name] = killed(make(Path(scratch)), options.kills, options.streams)
        print(json.dumps({name: shapes[name]}, indent=2), flush=True)
    record = {
        "what": f"seconds for which greedy streams stand still when one of {RANKS} ranks is killed; float32, medians",
        "date": datetime.date.today().isoformat(),
        "machine": machine("cpu"),
        "load average": [round(load, 1) for load in os.getloadavg()],
        "bar, beside reading": BAR,
        "shapes": shapes,
    }
    if not options.no_record:
        (RESULTS / f"recovery-cpu-{record['date']}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return int(
        any(each["beside reading"] > BAR or each["answers that differ"] or each["streams lost"] for each in shapes.values())
    )


if __name__ == "__main__":
    sys.exit(main())
