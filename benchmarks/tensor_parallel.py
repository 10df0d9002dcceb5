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
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.peers import Dtype, TesseraEngine
from benchmarks.serving import NEW_TOKENS, PROMPT_TOKENS, RESULTS, decode_rate, machine, make_model, times

BAR: Final = 0.9
"""Two ranks of one thread beside one rank of two."""


def measure(path: Path, dtype: Dtype, batches: list[int], ranks: int, repeats: int) -> dict[int, dict[int, float]]:
    """Tokens/s by number of ranks and sequences at once."""
    source = random.Random(0)
    rates: dict[int, dict[int, float]] = {1: {}, ranks: {}}
    with ExitStack() as stack:
        engines = {}
        for size in rates:
            engines[size] = TesseraEngine(path, dtype, "cpu", size)
            stack.callback(engines[size].close)
        for batch in batches:
            prompts = [[source.randrange(50_000) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
            measured: dict[int, list[tuple[float, float]]] = {size: [] for size in rates}
            for engine in engines.values():
                engine.generate(prompts, 4)
            for _ in range(repeats):
                for size, engine in engines.items():
                    measured[size].append(times(engine, prompts))
            for size, pairs in measured.items():
                rates[size][batch] = decode_rate(pairs, batch)
    return rates


def main() -> int:
    """Run the benchmark, print it, and record it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-record", action="store_true", help="write no result file")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    console, results = Console(width=110), {}
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in options.dtypes:
            path = make_model(Path(scratch), dtype)
            rates = results[dtype] = measure(path, dtype, options.batches, options.ranks, options.repeats)
            table = Table("", *(f"{batch} at once" for batch in options.batches), title=f"decode tokens/s, {dtype}")
            for size, by_batch in rates.items():
                table.add_row(f"ranks: {size}", *(f"{rate:.0f}" for rate in by_batch.values()))
            shares = [rates[options.ranks][batch] / rates[1][batch] for batch in options.batches]
            table.add_row(f"share (bar {BAR})", *(f"{share:.2f}" for share in shares))
            console.print(table)
    if options.no_record:
        return 0
    today = datetime.date.today().isoformat()
    out = RESULTS / f"tensor-parallel-cpu-{today}.json"
    record = {
        "what": f"decode tokens/s by number of ranks on the same cores, Pythia-160M shape, {PROMPT_TOKENS} + {NEW_TOKENS} "
        f"tokens, medians of {options.repeats} repetitions",
        "date": today, "machine": machine("cpu"), "bar": BAR, "tokens_per_second": results,
    }  # fmt: skip
    out.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"recorded in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
