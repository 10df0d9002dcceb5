"""What safety costs: ``make bench-safety``.

TLS with tokens is measured beside neither, and calls that outlive the ranks beside such that do not. Two servers run side by
side and are asked by turns, each in its turn alone, in an order that changes from one turn to the next. A ratio is that of two
neighbouring turns, so that a machine that becomes slower meanwhile slows both; told is the median. Of two servers that are the
same the ratio is told too: what it is beside 1 is the machine's doing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import pairs
from benchmarks.guarded import make_certificate
from benchmarks.open_loop import Load, Running
from serve.rpc.tokens import add_token

WARM_SECONDS: Final = 2
BARS: Final = {"TLS and tokens / plain": 0.98, "requeue and resumable streams / neither": 0.99}


def tokens_a_second(load: Load) -> float:
    """Of one turn, its first seconds left out."""
    outcome = pairs.ended_well(Running(load))
    whole = range(WARM_SECONDS, int(load.seconds))
    return sum(outcome.tokens_by_second.get(second, 0) for second in whole) / len(whole)


def by_turns(first: Load, second: Load, turns: int) -> dict[str, Any]:
    """The second of two servers beside the first."""
    speeds = pairs.by_turns(partial(tokens_a_second, first), partial(tokens_a_second, second), turns)
    ratios = [other / one for one, other in speeds]
    return {
        "ratio, median": round(statistics.median(ratios), 4), "ratios": [round(ratio, 3) for ratio in ratios],
        "tokens a second": [[round(one, 1), round(other, 1)] for one, other in speeds],
    }  # fmt: skip


def measure(scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All pairs, one after the other."""
    model = pairs.model_of(scratch, options)
    make_certificate(scratch, "ca")
    cert, key = make_certificate(scratch, "server", by="ca")
    tokens = scratch / "tokens.json"
    token = add_token(tokens, "caller", scopes=("generate",), expires=None, given={})
    guard = ("--tls-cert", str(cert), "--tls-key", str(key), "--tokens", str(tokens))
    both_ways: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "TLS and tokens / plain": ((), guard),
        "requeue and resumable streams / neither": (("--no-requeue", "--no-resume-streams"), ()),
        "plain / plain": ((), ()),
    }
    results: dict[str, Any] = {}
    for name, both in both_ways.items():
        with contextlib.ExitStack() as stack:
            loads = []
            for words in both:
                shown = {"token": token, "ca": str(scratch / "ca.pem")} if words is guard else {}
                seconds = WARM_SECONDS + options.seconds
                loads.append(pairs.asked(stack, model, *words, seconds=seconds, new_tokens=options.tokens, **shown)[1])
            results[name] = by_turns(loads[0], loads[1], options.turns)
        print(json.dumps({name: results[name]}), flush=True)
    return results


def main() -> int:
    """Print and record; 0 if both bars are kept."""
    options = pairs.parser(__doc__, seconds="of a turn that count", turns=5).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), options)
    pairs.record(options.out, __doc__, results)
    return int(any(results[name]["ratio, median"] < bar for name, bar in BARS.items()))


if __name__ == "__main__":
    sys.exit(main())
