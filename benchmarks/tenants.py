"""What a flood of one tenant costs another: ``make bench-tenants``.

One server with tokens for two tenants. In turns, one of them makes calls at random moments within its share, alone and then
beside the other, who makes ten times as many as its share: half of what the server can do is the share of each. Measured is the
time to the first token of the one who keeps to its share. It is done twice: with limits in the file of tokens, by which each
tenant may have half of the places (``max_running``), and without any, where the server alone keeps them apart.

Calls come at random moments, so the timed tenant has more of them under way than its share of the places now and then, and such
a call waits for its own. Those that came while it had no more calls than half of the places are told beside the rest.

There are as many places as a step can take without becoming much longer: it reads the weights once, however many there are.
What the flood costs is then what it keeps another waiting, not what a larger batch takes to compute.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.guarded import machine, make_model, serving
from benchmarks.open_loop import Load, Outcome, Running, percentile, spread
from serve.rpc.tokens import add_token

PLACES = 16
"""Calls come at random moments, so whoever keeps to a share in the mean wants more than that at times, and waits: one call of
13 with 8 places, one of 60 with 16, which leaves the 95th percentile alone."""
WARM_SECONDS = 4.0


def share_of(loads: list[Load], seconds: float) -> float:
    """Calls a second of each tenant where all make as many at once as fill their places."""
    both = [Running(replace(load, seconds=WARM_SECONDS + seconds, streams=PLACES // 2 + 2)) for load in loads]
    whole = range(int(WARM_SECONDS), int(WARM_SECONDS + seconds))
    outcomes = [each.outcome() for each in both]
    came = sum(outcome.tokens_by_second.get(second, 0) for outcome in outcomes for second in whole)
    return came / len(whole) / len(loads) / loads[0].new_tokens


def turn(kept: Load, flood: Load | None, seconds: float) -> tuple[Outcome, Outcome | None]:
    """The tenant that keeps to its share, alone or beside the other."""
    flooding = None
    if flood is not None:
        flooding = Running(replace(flood, seconds=WARM_SECONDS * 2 + seconds))
        time.sleep(WARM_SECONDS)
    keeping = Running(replace(kept, seconds=WARM_SECONDS + seconds, warm_seconds=WARM_SECONDS)).outcome()
    return keeping, flooding.outcome() if flooding is not None else None


def measure(scratch: Path, options: argparse.Namespace, *, limits: bool) -> dict[str, Any]:
    """Turns on one server; the ratio of the 95th percentiles of neighbouring turns, and of all calls together."""
    tokens = scratch / f"tokens-{limits}.json"
    given: dict[str, object] = {"max_running": PLACES // 2, "max_queued": 32} if limits else {}
    flood_token, kept_token = (
        add_token(tokens, name, scopes=("generate",), expires=None, given=given) for name in ("flood", "kept")
    )
    fixed = ("--max-num-seqs", str(PLACES), "--max-queued-requests", "128", "--no-prefix-caching")
    alone: list[Outcome] = []
    beside: list[Outcome] = []
    floods: list[Outcome] = []
    with serving(scratch / "model", "--tokens", str(tokens), *fixed) as server:
        kept = Load(address=server.address, seconds=0, token=kept_token, prompt_tokens=16, new_tokens=options.tokens)
        share = share_of([kept, replace(kept, token=flood_token)], options.seconds)
        kept = replace(kept, rate=options.used * share)
        flood = replace(kept, token=flood_token, rate=10 * share)
        for number in range(options.turns):
            seeded = replace(kept, seed=number)
            alone.append(turn(seeded, None, options.seconds)[0])
            both = turn(seeded, replace(flood, seed=1000 + number), options.seconds)
            beside.append(both[0])
            assert both[1] is not None
            floods.append(both[1])
            print(json.dumps({"alone": spread(alone[-1].first_token), "beside": spread(beside[-1].first_token)}), flush=True)
    ratios = [percentile(b.first_token, 0.95) / percentile(a.first_token, 0.95) for a, b in zip(alone, beside, strict=True)]
    together = [[seconds for outcome in turns for seconds in outcome.first_token] for turns in (alone, beside)]
    within = [
        seconds
        for outcome in beside
        for seconds, calls in zip(outcome.first_token, outcome.in_flight, strict=True)
        if calls <= PLACES // 2
    ]
    return {
        "calls a second": {"share": round(share, 1), "kept": round(kept.rate, 1), "flood": round(flood.rate, 1)},
        "ms to first token, alone": spread(together[0]),
        "ms to first token, beside the flood": spread(together[1]),
        "ms to first token, beside the flood, of calls within the share": spread(within),
        "p95 beside / alone, of all calls": round(percentile(together[1], 0.95) / percentile(together[0], 0.95), 2),
        "p95 beside / alone, of calls within the share": round(percentile(within, 0.95) / percentile(together[0], 0.95), 2),
        "p95 beside / alone, median of turns": round(statistics.median(ratios), 2),
        "p95 beside / alone, each": [round(ratio, 2) for ratio in ratios],
        "kept, ends": [outcome.codes for outcome in beside],
        "flood, ends": [outcome.codes for outcome in floods],
        "client's lag, ms": round(1000 * max(outcome.lag for outcome in (*alone, *beside)), 1),
    }


def main() -> int:
    """Print and record; 0 if the bar of 1.5 is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a turn (20)")
    parser.add_argument("--turns", type=int, default=5, help="of each kind (5)")
    parser.add_argument("--tokens", type=int, default=64, help="that each call generates (64)")
    parser.add_argument("--used", type=float, default=0.4, help="part of its share that the timed tenant takes (0.4)")
    parser.add_argument("--only", choices=["limits", "none"], help="one of the two configurations")
    parser.add_argument("--out", type=Path, help="result file")
    options = parser.parse_args()
    if not options.used > 0:
        parser.error(f"--used must be above 0, not {options.used:g}")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model", hidden=768, layers=12)
        for name in ("limits", "none"):
            if options.only in (None, name):
                results[name] = measure(Path(folder), options, limits=name == "limits")
                print(json.dumps({name: results[name]}, indent=1), flush=True)
    if options.out is not None:
        record = {"what": (__doc__ or "").split("\n")[0], "date": str(datetime.date.today()), "machine": machine()}
        found = {"part of its share used": options.used, "limits per tenant": results}
        options.out.write_text(json.dumps({**record, **found}, indent=2) + "\n")
    return int(any(result["p95 beside / alone, median of turns"] > 1.5 for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
