"""Decode speed of few sequences beside an older checkout and beside memory: ``python -m benchmarks.decode --beside PATH``.

Two engines in processes of their own, this checkout's and the other's, take turns over the same model; tokens/s are had as in
``benchmarks.serving``. With few sequences a step can be no faster than its weights are read: the record says how fast memory
was read in the same minutes, and which share of that bound each engine reaches. Without ``--beside`` the second engine is this
checkout's with ``kernels.record_steps`` off.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.peers import ROOT
from benchmarks.serving import NEW_TOKENS, PROMPT_TOKENS, RESULTS, decode_rate, machine, make_model
from finetune.model.pretrained import new_model

LATER, EARLIER = "this", "beside"
_TURN: Final = """
import dataclasses, json, logging, sys, time
from benchmarks import peers
logging.disable(logging.WARNING)
path, dtype, recorded = sys.argv[1:4]
plain = peers.server_config
def config(*arguments):
    made = plain(*arguments)
    if recorded == "no":
        made = dataclasses.replace(made, kernels=dataclasses.replace(made.kernels, record_steps=False))
    return made
peers.server_config = config
engine = peers.TesseraEngine(path, dtype, "cpu")
print("ready", flush=True)
for line in sys.stdin:
    prompts, counts = json.loads(line)
    seconds = []
    for tokens in counts:
        began = time.perf_counter()
        engine.generate(prompts, tokens)
        seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds), flush=True)
engine.close()
"""
"""Run in each checkout, so that nothing of the other's is imported."""


class Turns:
    """An engine of a checkout, which computes when it is asked to."""

    def __init__(self, checkout: Path, model: Path, dtype: str, *, recorded: bool) -> None:
        command = [sys.executable, "-c", _TURN, str(model), dtype, "yes" if recorded else "no"]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=checkout, env=environment, stdin=pipe, stdout=pipe, text=True)
        assert self._answer() == "ready\n", f"the engine of {checkout} did not start"

    def times(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[float]:
        """Seconds for each of these numbers of new tokens after every prompt."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([prompts, counts]) + "\n")
        self._process.stdin.flush()
        seconds: list[float] = json.loads(self._answer())
        return seconds

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def make_grouped(folder: Path, dtype: str) -> Path:
    """Save a Llama of 24 layers of 1,024 features, four query heads to each key/value head: 0.35 billion numbers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=4, intermediate_size=2816,
        vocab_size=50_304, max_position_embeddings=2048,
    )  # fmt: skip
    new_model(config, getattr(torch, dtype)).save_pretrained(folder / f"llama-{dtype}")
    return folder / f"llama-{dtype}"


MODELS: Final[dict[str, Callable[[Path, str], Path]]] = {"Pythia-160M": make_model, "Llama-350M": make_grouped}


def bytes_read(path: Path, dtype: str) -> int:
    """Bytes of the weights that a step reads whole: all but the input embedding."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    numbers = sum(parameter.numel() for parameter in model.parameters()) - embedding.numel()
    return numbers * int(getattr(torch, dtype).itemsize)


def read_rate(numbers: torch.Tensor) -> float:
    """Bytes a second at which all cores read memory, the best of three."""
    best = 0.0
    for _ in range(3):
        began = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.numel() * numbers.itemsize / (time.perf_counter() - began))
    return best


def measure(path: Path, dtype: str, beside: Path | None, batches: list[int], repeats: int, console: Console) -> dict[str, Any]:
    """Tokens/s by sequences at once and by engine, and what memory would allow."""
    source, found = random.Random(0), {}
    weights, numbers = bytes_read(path, dtype), torch.ones(1 << 26)
    with ExitStack() as stack:
        engines = {LATER: Turns(ROOT, path, dtype, recorded=True)}
        engines[EARLIER] = Turns(beside or ROOT, path, dtype, recorded=beside is not None)
        for engine in engines.values():
            stack.callback(engine.close)
        for batch in batches:
            prompts = [[source.randrange(50_000) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
            for engine in engines.values():
                engine.times(prompts, [8])
            measured: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
            rates = []
            for turn in range(repeats):
                rates.append(read_rate(numbers))
                # Each begins every other turn: the one that follows the reading of memory is the slower for it.
                for name, engine in sorted(engines.items(), reverse=turn % 2 == 1):
                    first, whole = engine.times(prompts, [1, NEW_TOKENS + 1])
                    measured[name].append((first, whole))
            read = statistics.median(rates)
            tokens = {name: decode_rate(pairs, batch) for name, pairs in measured.items()}
            found[str(batch)] = {
                "tokens_per_second": {name: round(rate, 1) for name, rate in tokens.items()},
                "ratio": round(tokens[LATER] / tokens[EARLIER], 3),
                "read_gb_per_second": round(read / 1e9, 1),
                "share_of_memory_bound": {name: round(rate / batch * weights / read, 3) for name, rate in tokens.items()},
                "milliseconds_beside_reading": {
                    name: round(1e3 * (batch / rate - weights / read), 2) for name, rate in tokens.items()
                },
            }
            console.print(f"[dim]{path.name}, {batch} at once: {found[str(batch)]}")
    return {"weights_mb": round(weights / 1e6, 1), "at_once": found}


def main() -> int:
    """Run the benchmark, print it, and record it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="another checkout, whose engine takes turns")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-record", action="store_true", help="write no result file")
    parser.add_argument("--out", type=Path, help="result file; default: benchmarks/results/decode-cpu-<date>.json")
    options = parser.parse_args()
    console, results = Console(width=110), {}
    today = datetime.date.today().isoformat()
    out = options.out or RESULTS / f"decode-cpu-{today}.json"
    earlier = "the steps computed by Python" if options.beside is None else "the checkout beside it"
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models:
            for dtype in options.dtypes:
                path = MODELS[name](Path(scratch), dtype)
                results[f"{name}, {dtype}"] = cell = measure(
                    path, dtype, options.beside, options.batches, options.repeats, console
                )
                table = Table("", *(f"{batch} at once" for batch in options.batches), title=f"{name}, {dtype}: decode tokens/s")
                for who in (LATER, EARLIER):
                    table.add_row(who, *(f"{each['tokens_per_second'][who]:.0f}" for each in cell["at_once"].values()))
                table.add_row("ratio", *(f"{each['ratio']:.2f}" for each in cell["at_once"].values()))
                console.print(table)
    if options.no_record:
        return 0
    record = {
        "what": f"decode tokens/s of few sequences beside {earlier}, {PROMPT_TOKENS} + {NEW_TOKENS} tokens, medians of "
        f"{options.repeats} turns, and what reading the weights alone would allow",
        "date": today, "machine": machine("cpu"), "cells": results,
    }  # fmt: skip
    if out.exists():  # cells may be measured one after the other
        record["cells"] = {**json.loads(out.read_text())["cells"], **results}
    out.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"recorded in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
