"""The server beside OpenVINO GenAI, llama.cpp, CTranslate2 and transformers, in one run on this machine's CPU.

Each engine is a process of its own and gets the same weights, prompts and threads; one computes at a time, the others idle.
They take turns, so that a slow minute of the machine falls on all of them. Decode tokens/s = sequences x 64 / (seconds for 65
new tokens - seconds for 1), greedy, all submitted at once; prefill tokens/s = prompt tokens / seconds for 1; arrivals: of 32
prompts of 64 tokens, one every 20 ms, new tokens / seconds until the last is answered, by engines that begin one beside others.
Ours is asked over gRPC, a call for each sequence, and answers when it has all tokens, as the peers do; with
``--streamed`` as soon as it has each.
The record, with a plot beside it, is written anew after each cell; ``--continue`` takes up one that was interrupted.

The first run installs the peers below ``--cache``, compiles llama.cpp, and converts the weights: about 6 GB and half an hour.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console

from benchmarks.engines.cells import NEW_TOKENS, Cell, chosen
from benchmarks.engines.drawing import draw
from benchmarks.engines.environments import Unavailable
from benchmarks.engines.figures import Seconds, agreement, summary, table
from benchmarks.engines.peers import ENGINES, Kitchen, usable_cores
from benchmarks.engines.process import ROOT, EngineProcess
from benchmarks.engines.reference import reference_of
from finetune.machine.inventory import cpu_description

RESULTS: Final = ROOT / "benchmarks" / "results"
WARM_TOKENS: Final = 4
COMPARED: Final = 8
"""Sequences whose tokens are compared, of 64 + 64 tokens."""


def device() -> str:
    """The processor's name, and its vector instructions."""
    return f"{cpu_description()}, {usable_cores()} cores"


class Run:
    """A run and its record."""

    def __init__(self, kitchen: Kitchen, out: Path, record: dict[str, Any], options: argparse.Namespace) -> None:
        self._kitchen, self._logs, self._out = kitchen, options.cache / "logs", out
        self._turns, self._names, self._streamed = options.turns, options.engines, options.streamed
        self.record = record

    def measure(self, cells: list[Cell], console: Console) -> None:
        """All cells that the record lacks; the engines of one shape and precision are alive together."""
        missing = [cell for cell in cells if cell.name not in self.record["cells"]]
        for (shape, precision), group in groupby(missing, key=lambda cell: (cell.shape, cell.precision)):
            with ExitStack() as stack:
                engines = self._start(shape, precision, stack)
                time.sleep(1.0)  # what starting left behind ends; the next line says whether it did
                busy = psutil.cpu_percent(interval=1.0) * (os.cpu_count() or 1) / 100
                self.record["idle"][f"{shape}/{precision}"] = {"cores busy while all engines idle": round(busy, 2)}
                self._compare(shape, precision, engines)
                for cell in group:
                    began = time.monotonic()
                    turns = self._cell(cell, engines)
                    told = summary(cell, turns) | {"load average": round(os.getloadavg()[0], 1)}
                    self.record["cells"][cell.name] = told
                    self.record["wall_seconds"] = round(self.record["wall_seconds"] + time.monotonic() - began, 1)
                    self.write()
                    rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in told["tokens_per_second"].items())
                    console.print(f"{cell.name}: {rates}; tessera / best {told.get('tessera / best peer', '–')}")

    def _start(self, shape: str, precision: str, stack: ExitStack) -> dict[str, EngineProcess]:
        """The engines that can be had here; the record says why the others cannot."""
        engines = {}
        for name in self._names:
            label = f"{name} {shape}/{precision}"
            self.record["failed"].pop(label, None)
            try:
                start = ENGINES[name](self._kitchen, shape, precision)
                start.settings["streamed"] = self._streamed  # which ours looks at
                engines[name] = EngineProcess(start, self._logs / f"{name}-{shape}-{precision}.log")
                stack.callback(engines[name].close)
                self.record["versions"] |= engines[name].versions
            except Unavailable as error:
                self._failed(label, error)
        return engines

    def _failed(self, label: str, error: Unavailable) -> None:
        self.record["failed"][label] = str(error)
        self.write()
        print(f"without {label}: {error}", flush=True)

    def _compare(self, shape: str, precision: str, engines: dict[str, EngineProcess]) -> None:
        """Tokens of each engine beside those of transformers in fp32."""
        prompts = Cell(shape, "fp32", "decode", COMPARED, 64).prompts()
        try:
            reference = reference_of(self._kitchen, shape, prompts, NEW_TOKENS)
        except Unavailable as error:
            return self._failed(f"reference {shape}", error)
        for name, engine in engines.items():
            try:
                ids = engine.generate(prompts, NEW_TOKENS, exact=precision == "fp32").ids
            except Unavailable as error:
                self._failed(f"{name} {shape}/{precision} tokens", error)
                continue
            told = agreement(ids, reference, exact=precision == "fp32")
            self.record["agreement"].setdefault(f"{shape}/{precision}", {})[name] = told
        return None

    def _cell(self, cell: Cell, engines: dict[str, EngineProcess]) -> dict[str, list[Seconds]]:
        """Seconds of each engine in each turn; who goes first changes. An engine that fails is left out from there on."""
        prompts = cell.prompts()
        turns: dict[str, list[Seconds]] = {name: [] for name in engines}
        for turn in range(-1, self._turns):
            names = list(turns)
            first = max(turn, 0) % max(len(names), 1)
            for name in names[first:] + names[:first]:
                try:
                    if turn < 0:  # first calls build plans and pools
                        engines[name].generate(prompts, WARM_TOKENS, every=cell.every)
                        continue
                    one = 0.0 if cell.kind == "arrivals" else engines[name].generate(prompts, 1).seconds
                    whole = one
                    if cell.kind != "prefill":
                        whole = engines[name].generate(prompts, NEW_TOKENS + 1, every=cell.every).seconds
                    turns[name].append((one, whole))
                except Unavailable as error:
                    self._failed(f"{name} {cell.name}", error)
                    del turns[name]
        return turns

    def write(self) -> None:
        """The record and its plot, whole or as they were."""
        unfinished = self._out.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self._out)
        if self.record["cells"]:
            draw(self.record, self._out.with_suffix(".svg"))


def fresh(turns: int, *, streamed: bool) -> dict[str, Any]:
    """A record of nothing yet."""
    way = "token by token" if streamed else "whole answers"
    return {
        "what": f"Tessera over gRPC ({way}) beside other engines, same weights and prompts, greedy; decode: "
        f"{NEW_TOKENS} tokens after the first of each prompt; prefill: until the last first token; {usable_cores()} threads; "
        f"medians of {turns} turns, and of the ratios of the same turns",
        "date": datetime.date.today().isoformat(),
        "machine": {"device": device(), "python": platform.python_version()},
        "versions": {}, "turns": turns, "wall_seconds": 0.0, "failed": {}, "idle": {}, "agreement": {}, "cells": {},
    }  # fmt: skip


def begun(out: Path | None, new: dict[str, Any]) -> dict[str, Any]:
    """The record that a file has, if there is one; else ``new``.

    Raises:
        ValueError: its figures were had in another way than is meant now.
    """
    if out is None or not out.is_file():
        return new
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    if found["what"] != new["what"]:
        raise ValueError(f"{out}: its figures are of {found['what']!r}, not of {new['what']!r}")
    return found


def arguments() -> argparse.Namespace:
    """What the command was told."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="decoding of the 160M shape alone, in two turns")
    parser.add_argument("--cells", nargs="+", default=[], metavar="PATTERN", help="cells by name, such as '160m/bf16/*'")
    parser.add_argument("--turns", type=int, help="of each cell (3; 2 with --quick)")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES), help="which take part (all)")
    parser.add_argument(
        "--streamed", action="store_true", help="ours tells each token as it comes, not the whole answer at once"
    )
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "peers", help="environments and models (.cache/peers)")
    parser.add_argument("--out", type=Path, help="the record; default: benchmarks/results/peers-cpu-<date>.json")
    parser.add_argument(
        "--continue", dest="go_on", action="store_true", help="take up the record at --out; else it is replaced"
    )
    options = parser.parse_args()
    options.turns = options.turns or (2 if options.quick else 3)
    try:
        options.cells = chosen(options.cells, options.quick)
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> int:
    """Measure, print and record; 1 if ours could not be measured."""
    options = arguments()
    out = options.out or RESULTS / f"peers-cpu-{datetime.date.today().isoformat()}.json"
    try:
        record = begun(out if options.go_on else None, fresh(options.turns, streamed=options.streamed))
    except ValueError as mismatch:
        sys.exit(f"--continue: {mismatch}")
    run = Run(Kitchen(options.cache), out, record, options)
    console = Console(width=128)
    run.measure(options.cells, console)
    console.print(table(record, options.engines))
    for label, told in record["agreement"].items():
        console.print(f"tokens of transformers in fp32, {label}: " + ", ".join(
            f"{name} {each['the same']}/{each['sequences']}" + (f" (+ {each['ties']} ties)" if each.get("ties") else "")
            for name, each in told.items()
        ))  # fmt: skip
    for label, error in record["failed"].items():
        console.print(f"without {label}: {error}", markup=False)
    console.print(f"recorded in {out}")
    return int(any("tessera" not in cell["tokens_per_second"] for cell in record["cells"].values()))


if __name__ == "__main__":
    sys.exit(main())
