"""What it costs to watch a server: ``python -m benchmarks.watching``.

A server that traces every call to a collector and is scraped each second is measured beside one that is neither, by turns as
``benchmarks.safety`` takes them: 32 streams, both servers on the same cores, an order that changes, the median of the ratios of
neighbouring turns. Speed is that of a stream, by the mean time between two of its tokens, which each server counts. Processor
time of the server and its rank for a thousand tokens is told too, which other work on the machine does not stretch as it does
seconds. Of two servers that are the same both are told as well: what they are beside 1 is the machine's doing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from benchmarks import pairs
from benchmarks.guarded import Server
from benchmarks.open_loop import Load, Running

SCRAPE_SECONDS: Final = 1.0
BAR: Final = 0.99
WATCHED: Final = "traced and scraped / neither"
ALIKE: Final = "neither / neither"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes traces and counts their spans."""

    def __init__(self) -> None:
        self.num_spans = 0

    def Export(self, request: Any, context: Any) -> Any:
        """One batch of the server's."""
        self.num_spans += sum(len(scope.spans) for each in request.resource_spans for scope in each.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """A collector on a free port of loopback, and where it is."""
    server, collector = grpc.server(futures.ThreadPoolExecutor(max_workers=1)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]  # generated
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@dataclass
class Asked:
    """A server under load in its turns."""

    server: Server
    load: Load
    scraped: bool = False
    num_scrapes: int = 0

    def turn(self) -> tuple[float, float]:
        """(milliseconds between two tokens of a stream; processor seconds of all its processes for a thousand tokens)."""
        gaps, before, over = self._gaps(), self._processor_seconds(), threading.Event()
        scraper = threading.Thread(target=self._scrape, args=(over,))
        running = Running(self.load)
        if self.scraped:
            scraper.start()
        try:
            outcome = pairs.ended_well(running)
        finally:
            over.set()
            if self.scraped:
                scraper.join()
        taken, (seconds, count) = self._processor_seconds() - before, self._gaps()
        return 1000.0 * (seconds - gaps[0]) / (count - gaps[1]), 1000.0 * taken / sum(outcome.tokens_by_second.values())

    def _gaps(self) -> tuple[float, float]:
        """Seconds between tokens, and how many gaps that were, since the start."""
        told = self.server.metrics()
        seconds, count = (
            sum(value for name, value in told.items() if name.startswith(f"tessera_inter_token_latency_seconds_{what}"))
            for what in ("sum", "count")
        )
        return seconds, count

    def _scrape(self, over: threading.Event) -> None:
        while not over.wait(SCRAPE_SECONDS):
            assert self.server.metrics(), "as Prometheus does, the whole of it is read"
            self.num_scrapes += 1

    def _processor_seconds(self) -> float:
        own = psutil.Process(self.server.process.pid)
        times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
        return sum(each.user + each.system for each in times)


def by_turns(plain: Asked, watched: Asked, turns: int) -> dict[str, Any]:
    """The second of two servers beside the first."""
    rows = pairs.by_turns(plain.turn, watched.turn, turns)
    speeds, seconds = [one[0] / other[0] for one, other in rows], [other[1] / one[1] for one, other in rows]
    return {
        "speed of a stream, median of ratios": round(statistics.median(speeds), 4),
        "ratios": [round(each, 4) for each in speeds],
        "processor seconds a token, median of ratios": round(statistics.median(seconds), 4),
        "their ratios": [round(each, 4) for each in seconds],
        "milliseconds between tokens": [[round(one[0], 2), round(other[0], 2)] for one, other in rows],
        "processor seconds for a thousand tokens": [[round(one[1], 3), round(other[1], 3)] for one, other in rows],
    }  # fmt: skip


def measure(scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Watched beside not watched, then two that are not, fewer times."""
    model, results = pairs.model_of(scratch, options), dict[str, Any]()

    def asked(stack: contextlib.ExitStack, *words: str, scraped: bool) -> Asked:
        return Asked(*pairs.asked(stack, model, *words, seconds=options.seconds, new_tokens=options.tokens), scraped)

    def keep(name: str, turns: int, make: Callable[[contextlib.ExitStack], tuple[Asked, Asked]]) -> None:
        with contextlib.ExitStack() as stack:
            plain, other = make(stack)
            results[name] = by_turns(plain, other, turns) | {"scrapes": other.num_scrapes}
        print(json.dumps({name: results[name]}), flush=True)

    with collecting() as (collector, endpoint):
        words = ("--otlp-endpoint", endpoint, "--trace-ratio", "1")
        keep(WATCHED, options.turns, lambda stack: (asked(stack, scraped=False), asked(stack, *words, scraped=True)))
    results[WATCHED]["spans"] = collector.num_spans
    if not collector.num_spans or not results[WATCHED]["scrapes"]:
        raise RuntimeError("nothing was traced or scraped: there is nothing to tell of")
    keep(ALIKE, options.control_turns, lambda stack: (asked(stack, scraped=False), asked(stack, scraped=False)))
    return results


def main() -> int:
    """Print and record; 0 if the bar is kept."""
    parser = pairs.parser(__doc__, seconds="for which calls begin in a turn", turns=8)
    parser.add_argument("--control-turns", type=int, default=4, help="of each of two servers that are the same (4)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), options)
    facts = {"traced": "every call (--trace-ratio 1; the default is 0.01)", "scraped every": f"{SCRAPE_SECONDS:g} s"}
    pairs.record(options.out, __doc__, results, **facts)
    return int(results[WATCHED]["speed of a stream, median of ratios"] < BAR)


if __name__ == "__main__":
    sys.exit(main())
