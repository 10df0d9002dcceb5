"""``python -m tests.chaos [CASE ...]``: strike a server that serves, many times, and read the history of its calls afterwards.

A fault counts only if at least twenty streams were under way and well before it. Each ends when streams say something again; at
the end every call must have been answered, exactly, once, and nothing may be left over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.history import CALL_SECONDS, Load, judge, undisturbed
from tests.support.models import save
from tests.support.server import Server, lives, serving, until
from tests.support.shared_memory import abandoned, in_shared_memory

LEAST_STREAMS = 20


def _ranks(server: Server) -> list[int]:
    return until(lambda: len(pids := server.rank_pids()) == 2 and pids)


def _strike(number: signal.Signals) -> Callable[[Server, random.Random], None]:
    def strike(server: Server, draw: random.Random) -> None:
        os.kill(draw.choice(_ranks(server)), number)

    return strike


def _kill_again(server: Server, draw: random.Random) -> None:
    """Ranks that come to replace dead ones are killed while they start."""
    old = _ranks(server)
    os.kill(draw.choice(old), signal.SIGKILL)
    new = until(lambda: [pid for pid in server.rank_pids() if pid not in old], every=0.001)
    os.kill(new[0], signal.SIGKILL)


CASES: dict[str, tuple[str, Callable[[Server, random.Random], None]]] = {
    "kill": ("a rank is killed", _strike(signal.SIGKILL)),
    "freeze": ("a rank is stopped and stays so", _strike(signal.SIGSTOP)),
    "kill-again": ("a rank is killed, and one of those that come while it starts", _kill_again),
}


def _once(server: Server, load: Load, case: str, draw: random.Random) -> float:
    """One fault. Returns the seconds until a stream that it met says something again."""
    met = until(lambda: len(calls := load.under_way()) >= LEAST_STREAMS and calls)
    time.sleep(draw.random() / 4)  # at a moment of no meaning: what is waited for is that it does not matter
    restarts = server.metrics()["tessera_engine_restarts_total"]
    began = time.monotonic()
    CASES[case][1](server, draw)
    until(lambda: server.metrics()["tessera_engine_restarts_total"] > restarts)
    restarted = time.monotonic()
    until(lambda: any(call.last_seconds > restarted or call.code is not None for call in met))
    until(lambda: server.health() == "SERVING")
    return min((call.last_seconds for call in met if call.last_seconds > restarted), default=time.monotonic()) - began


def _run(server: Server, case: str, times: int, seed: int) -> dict[str, object]:
    draw = random.Random(seed)
    expected = undisturbed(server)
    shared = in_shared_memory()
    seen: set[int] = set()
    load, seconds = Load(server, seed), []
    with load.going_on():
        for _ in range(times):
            seen.update(_ranks(server))
            seconds.append(_once(server, load, case, draw))
            after = load.num_ended
            until(lambda after=after: load.num_ended >= after + LEAST_STREAMS, seconds=CALL_SECONDS)  # type: ignore[misc]
    verdict = judge(load.calls, expected)
    current = set(_ranks(server))
    until(lambda: server.metrics()["tessera_kv_blocks_used"] == 0)
    ended = server.metrics()['tessera_request_finished_total{reason="length"}']
    left = [f"process {pid}" for pid in seen - current if lives(pid)] + sorted(abandoned(shared))
    return {
        "fault": CASES[case][0], "times": times, "calls": verdict.calls, "lost": verdict.lost, "wrong": verdict.wrong,
        "kept": server.metrics()["tessera_requests_kept_total"], "left over": left,
        "counted": ended == verdict.calls - sum(verdict.lost.values()) + len(expected),
        "seconds to the next token": {"median": round(statistics.median(seconds), 2), "most": round(max(seconds), 2)},
    }  # fmt: skip


def _is_well(result: dict[str, object]) -> bool:
    return not (result["lost"] or result["wrong"] or result["left over"]) and bool(result["counted"])


def main() -> int:
    """Run the cases; 0 if none of them lost or spoiled anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; none: all")
    parser.add_argument("--times", type=int, default=20, help="how often each (20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}; there are {', '.join(CASES)}")
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = save("gpt_neox", Path(scratch) / "neox")
        for case in options.cases or CASES:
            with serving(model, "--tensor-parallel-size", "2", "--max-num-seqs", "64") as server:
                results[case] = _run(server, case, options.times, options.seed)
            print(f"{case}: {json.dumps(results[case])}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=2) + "\n")
    bad = [case for case, result in results.items() if not _is_well(result)]
    if bad:
        print(f"not well: {', '.join(bad)}", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
