"""What safety costs: ``make bench-safety``.

TLS with tokens is measured beside neither, and calls that outlive the ranks beside such that do not. Two servers run side by
side and are asked by turns, each in its turn alone, in an order that changes from one turn to the next. A ratio is that of two
neighbouring turns, so that a machine that becomes slower meanwhile slows both; told is the median. Of two servers that are the
same the ratio is told too: what it is beside 1 is the machine's doing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.guarded import machine, make_certificate, make_model, serving
from benchmarks.open_loop import Load, Running
from serve.rpc.tokens import add_token

STREAMS: Final = 32
WARM_SECONDS: Final = 2
BARS: Final = {"TLS and tokens / plain": 0.98, "requeue and resumable streams / neither": 0.99}


def tokens_a_second(load: Load) -> float:
    """Of one turn, its first seconds left out."""
    outcome = Running(load).outcome()
    if set(outcome.codes) != {"OK"}:
        raise RuntimeError(f"calls failed: {outcome.codes}")
    whole = range(WARM_SECONDS, int(load.seconds))
    return sum(outcome.tokens_by_second.get(second, 0) for second in whole) / len(whole)


def by_turns(first: Load, second: Load, turns: int) -> dict[str, Any]:
    """The second of two servers beside the first."""
    speeds: list[tuple[float, float]] = []
    for number in range(turns):
        if number % 2:
            other, one = tokens_a_second(second), tokens_a_second(first)
        else:
            one, other = tokens_a_second(first), tokens_a_second(second)
        speeds.append((one, other))
    ratios = [other / one for one, other in speeds]
    return {
        "ratio, median": round(statistics.median(ratios), 4), "ratios": [round(ratio, 3) for ratio in ratios],
        "tokens a second": [[round(one, 1), round(other, 1)] for one, other in speeds],
    }  # fmt: skip


def measure(scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All pairs, one after the other."""
    model = make_model(scratch / "model", hidden=options.hidden, layers=12, vocabulary=50_304)
    make_certificate(scratch, "ca")
    cert, key = make_certificate(scratch, "server", by="ca")
    tokens = scratch / "tokens.json"
    token = add_token(tokens, "caller", scopes=("generate",), expires=None, given={})
    guard = ("--tls-cert", str(cert), "--tls-key", str(key), "--tokens", str(tokens))
    pairs: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "TLS and tokens / plain": ((), guard),
        "requeue and resumable streams / neither": (("--no-requeue", "--no-resume-streams"), ()),
        "plain / plain": ((), ()),
    }
    results: dict[str, Any] = {}
    for name, both in pairs.items():
        with contextlib.ExitStack() as stack:
            loads = []
            for words in both:
                server = stack.enter_context(serving(model, "--max-num-seqs", str(STREAMS), "--no-prefix-caching", *words))
                load = Load(
                    address=server.address, seconds=WARM_SECONDS + options.seconds, streams=STREAMS, prompt_tokens=16,
                    new_tokens=options.tokens,
                )  # fmt: skip
                loads.append(replace(load, token=token, ca=str(scratch / "ca.pem")) if words is guard else load)
            results[name] = by_turns(loads[0], loads[1], options.turns)
        print(json.dumps({name: results[name]}), flush=True)
    return results


def main() -> int:
    """Print and record; 0 if both bars are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn that count (5)")
    parser.add_argument("--turns", type=int, default=5, help="of each of two servers (5)")
    parser.add_argument("--tokens", type=int, default=32, help="that each call generates (32)")
    parser.add_argument("--hidden", type=int, default=768, help="width of the model (768: Pythia-160M's shape)")
    parser.add_argument("--out", type=Path, help="result file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), options)
    if options.out is not None:
        record = {"what": (__doc__ or "").split("\n")[0], "date": str(datetime.date.today()), "machine": machine()}
        options.out.write_text(json.dumps({**record, **results}, indent=2) + "\n")
    return int(any(results[name]["ratio, median"] < bar for name, bar in BARS.items()))


if __name__ == "__main__":
    sys.exit(main())
