"""Decode speed of several ranks beside one on the same cores, in one run: ``make bench-tensor-parallel``.

The shape is Pythia-160M's, and tokens/s are had as in ``benchmarks.serving``. What is lost is what the ranks' exchanges of
activations cost, one sum for each layer of this shape, one for the embedding and the gathering of the logits, and what one rank
computes while others wait.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.peers import Dtype, TesseraEngine
from benchmarks.serving import NEW_TOKENS, PROMPT_TOKENS, RESULTS, decode_rate, machine, make_model, times

BAR: Final = 0.9
"""Two ranks of one thread beside one rank of two."""


def measure(
    path: Path, dtype: Dtype, batches: list[int], ranks: int, repeats: int
) -> tuple[dict[int, dict[int, float]], dict[int, float]]:
    """Tokens/s by number of ranks and sequences at once, and by the latter which share of one rank's speed several reach.

    The share is the median of the turns', in each of which both are measured, one right after the other and either first.
    """
    source = random.Random(0)
    rates: dict[int, dict[int, float]] = {1: {}, ranks: {}}
    shares: dict[int, float] = {}
    with ExitStack() as stack:
        engines = {}
        for size in rates:
            engines[size] = TesseraEngine(path, dtype, "cpu", size)
            stack.callback(engines[size].close)
            engines[size].generate([[1, 2, 3]], 4)
        _wait_for_idle_ranks()
        for batch in batches:
            prompts = [[source.randrange(50_000) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
            measured: dict[int, list[tuple[float, float]]] = {size: [] for size in rates}
            for engine in engines.values():
                engine.generate(prompts, 4)
            for turn in range(repeats):
                for size, engine in sorted(engines.items(), reverse=turn % 2 == 1):
                    measured[size].append(times(engine, prompts))
            for size, pairs in measured.items():
                rates[size][batch] = decode_rate(pairs, batch)
            first = {size: statistics.median(one for one, _ in pairs) for size, pairs in measured.items()}
            turns = zip(measured[1], measured[ranks], strict=True)
            shares[batch] = statistics.median(
                (alone - first[1]) / (several - first[ranks]) for (_, alone), (_, several) in turns
            )
    return rates, shares


def _wait_for_idle_ranks() -> None:
    """Return when ranks have packed their weights, which they do beside the first answers: they take no processor then."""
    ranks = psutil.Process().children(recursive=True)
    while True:
        before = sum(sum(rank.cpu_times()[:2]) for rank in ranks)
        time.sleep(2.0)
        if sum(sum(rank.cpu_times()[:2]) for rank in ranks) - before < 0.05:
            return


def main() -> int:
    """Run the benchmark, print it, and record it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-record", action="store_true", help="write no result file")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    console = Console(width=110)
    results: dict[str, dict[int, dict[int, float]]] = {}
    reached: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in options.dtypes:
            path = make_model(Path(scratch), dtype)
            rates, shares = measure(path, dtype, options.batches, options.ranks, options.repeats)
            results[dtype], reached[dtype] = rates, shares
            table = Table("", *(f"{batch} at once" for batch in options.batches), title=f"decode tokens/s, {dtype}")
            for size, by_batch in rates.items():
                table.add_row(f"ranks: {size}", *(f"{rate:.0f}" for rate in by_batch.values()))
            table.add_row(f"share (bar {BAR})", *(f"{share:.2f}" for share in shares.values()))
            console.print(table)
    if options.no_record:
        return 0
    today = datetime.date.today().isoformat()
    out = RESULTS / f"tensor-parallel-cpu-{today}.json"
    record = {
        "what": f"decode tokens/s by number of ranks on the same cores, Pythia-160M shape, {PROMPT_TOKENS} + {NEW_TOKENS} "
        f"tokens, medians of {options.repeats} repetitions",
        "date": today, "machine": machine("cpu"), "bar": BAR, "tokens_per_second": results,
        "share": reached,
    }  # fmt: skip
    out.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"recorded in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
