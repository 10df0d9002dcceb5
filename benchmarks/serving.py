"""Decode speed of the engine and of the server beside transformers, in one run: ``make bench``.

The shape is Pythia-160M's with seeded random weights. Decode tokens/s = batch x 64 / (time for 65 new tokens - time for 1),
greedy, prompts of 64 tokens, all submitted at once. The systems take turns within each repetition, so that a slow moment of the
machine falls on all of them. Each time is the median of its repetitions, of which there are more where they are short.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import deepspeed
import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.peers import (
    Device,
    Dtype,
    Prompts,
    System,
    TesseraEngine,
    TesseraServer,
    TransformersContinuousBatching,
    TransformersGenerate,
    transformers_model,
)
from benchmarks.pretrained import without_advice, without_progress_bars
from finetune.machine.inventory import cpu_description
from finetune.model.pretrained import new_model

PROMPT_TOKENS = 64
NEW_TOKENS = 64
CELL_SECONDS = 60.0
"""How long a cell is repeated at least."""
RESULTS = Path(__file__).with_name("results")


def make_model(folder: Path, dtype: str) -> Path:
    """Save a GPT-NeoX of Pythia-160M's shape."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "gpt_neox", hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, vocab_size=50_304,
        max_position_embeddings=2048, rotary_pct=0.25,
    )  # fmt: skip
    new_model(config, getattr(torch, dtype)).save_pretrained(folder / dtype)
    return folder / dtype


def times(system: System, prompts: Prompts) -> tuple[float, float]:
    """Seconds for one new token of each prompt, and for all new tokens."""
    seconds = []
    for tokens in (1, NEW_TOKENS + 1):
        began = time.perf_counter()
        system.generate(prompts, tokens)
        seconds.append(time.perf_counter() - began)
    return seconds[0], seconds[1]


def decode_rate(measured: list[tuple[float, float]], batch: int) -> float:
    """Tokens per second of decoding alone.

    The medians of both times, not the median of their differences: what the first token takes varies by itself, with some
    systems by as much as ten tokens take.
    """
    first, whole = statistics.median(one for one, _ in measured), statistics.median(every for _, every in measured)
    return batch * NEW_TOKENS / (whole - first)


def measure(
    path: Path, dtype: Dtype, device: Device, batches: list[int], repeats: int, console: Console
) -> dict[str, dict[str, float]]:
    """Tokens/s of each system and batch size."""
    source = random.Random(0)
    rates: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        model = stack.enter_context(transformers_model(path, dtype, device))
        systems: list[System] = [TransformersGenerate(model), TransformersContinuousBatching(model)]
        for kind in (TesseraEngine, TesseraServer):
            systems.append(kind(path, dtype, device))
            stack.callback(systems[-1].close)
        for batch in batches:
            prompts = [[source.randrange(50_000) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
            for system in systems:
                system.generate(prompts, 4)  # first calls build plans and pools
            measured: dict[str, list[tuple[float, float]]] = {system.name: [] for system in systems}
            began = time.perf_counter()
            while len(measured[systems[0].name]) < repeats or time.perf_counter() - began < CELL_SECONDS:
                for system in systems:
                    measured[system.name].append(times(system, prompts))
            for name, pairs in measured.items():
                rates.setdefault(name, {})[str(batch)] = decode_rate(pairs, batch)
            console.print(
                f"[dim]{dtype}, {batch} at once, {len(measured[systems[0].name])} times: "
                + ", ".join(f"{name} {by_batch[str(batch)]:.0f}" for name, by_batch in rates.items())
            )
    return rates


def bars(results: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """The ratios that matter, by precision and batch size."""
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for dtype, by_system in results.items():
        engine = by_system["tessera engine"]
        ratios[dtype] = {
            batch: {
                "engine / transformers generate": rate / by_system["transformers generate"][batch],
                "engine / transformers continuous batching": rate / by_system["transformers continuous batching"][batch],
                "gRPC / engine": by_system["tessera over gRPC"][batch] / rate,
            }
            for batch, rate in engine.items()
        }
    return ratios


def report(
    results: dict[str, dict[str, dict[str, float]]], ratios: dict[str, dict[str, dict[str, float]]], console: Console
) -> None:
    """Print tokens/s and ratios."""
    for dtype, by_system in results.items():
        batches = list(next(iter(by_system.values())))
        table = Table("", *(f"{batch} at once" for batch in batches), title=f"decode tokens/s, {dtype}")
        for name, by_batch in by_system.items():
            table.add_row(name, *(f"{by_batch[batch]:.0f}" for batch in batches))
        table.add_section()
        for name in next(iter(ratios[dtype].values())):
            table.add_row(name, *(f"{ratios[dtype][batch][name]:.2f}" for batch in batches))
        console.print(table)


def machine(device: str) -> dict[str, str]:
    """What the figures belong to."""
    cpu = f"{cpu_description()}, {len(os.sched_getaffinity(0))} cores"
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "deepspeed": deepspeed.__version__,
    }


def main() -> int:
    """Run the benchmark, print it, and record it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3, help="fewest repetitions of a cell")
    parser.add_argument("--out", type=Path, help="result file; default: benchmarks/results/serving-<device>-<date>.json")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    without_advice()
    without_progress_bars()
    console = Console(width=110)
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in options.dtypes:
            path = make_model(Path(scratch), dtype)
            results[dtype] = measure(path, dtype, options.device, options.batches, options.repeats, console)
    ratios = bars(results)
    report(results, ratios, console)
    today = datetime.date.today().isoformat()
    out = options.out or RESULTS / f"serving-{options.device}-{today}.json"
    out.parent.mkdir(exist_ok=True)
    record = {
        "what": f"decode tokens/s, Pythia-160M shape, {PROMPT_TOKENS} + {NEW_TOKENS} tokens, "
        f"medians of {options.repeats} or more repetitions",
        "date": today, "machine": machine(options.device), "tokens_per_second": results, "ratios": ratios,
    }  # fmt: skip
    out.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"recorded in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
