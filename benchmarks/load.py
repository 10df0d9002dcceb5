"""How Tessera opens other trainers' checkpoints, beside the usual way, in one run: ``make bench-load``.

The model has Pythia-410M's shape (405 million parameters, seeded); four ranks of plain DeepSpeed write it once
into ``--work`` (``benchmarks/load_saves.py``). From the start of a process to the first token:

* a ZeRO-3 save, by ``tessera-serve`` on two ranks; and by ``zero_to_fp32.py``, ``from_pretrained`` and ``generate``;
* a Hugging Face folder, by ``tessera-serve`` on one rank; and by ``from_pretrained`` and ``generate``;
* the same weights cut for two ranks beforehand (``tessera-finetune export --tensor-parallel-size 2``), and whole.

``from_pretrained`` maps the file, and its pages are fetched by the first token: so reading and first token count together
("answer") there. Contenders take turns, so that a slow moment of the machine falls on all; what counts is the median. All files
are in the page cache when a turn begins, or none of them with ``--cold``. ``--memory`` measures instead what each serving rank
needs of memory, and how many bytes its reader reads, for every layout. The record is written anew after each cell; a record of
some ``--layouts`` keeps the others' figures that its file had, if they are of the same machine and versions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.load_memory import CASES, measure_memory
from benchmarks.load_server import drop_from_page_cache, fetch_into_page_cache, serving
from finetune.machine import inventory

HERE: Final = Path(__file__).resolve().parent
RESULTS: Final = HERE / "results"
DTYPE: Final = "bfloat16"
"""What the model is trained in and served in, by all contenders."""

Seconds = dict[str, float]
"""By part; ``total`` is all of it."""


def make_saves(work: Path, names: Sequence[str]) -> None:
    """Write what is not there yet."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", str(HERE / "load_saves.py"), str(work), *names]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    cut = work / "hf-cut"
    if "hf" in names and not cut.exists():
        export = ["-m", "finetune", "export", "--from", str(work / "hf"), "--to", str(cut), "--tensor-parallel-size", "2"]
        subprocess.run([sys.executable, *export], check=True, stdout=subprocess.DEVNULL, cwd=HERE.parent)


def by_tessera(folder: Path, ranks: int) -> Callable[[], Seconds]:
    """``tessera-serve``: parts are those of rank 0, which the server tells."""

    def turn() -> Seconds:
        with serving(folder, ranks, DTYPE) as served:
            parts = dict(served.seconds)
        load = parts["build"] + parts["weights"] + parts["cache"]
        rest = parts["total"] - load - parts["first token"]
        return {"start": rest, "read": load, "first token": parts["first token"], "total": parts["total"]}

    return turn


def by_transformers(folder: Path) -> Callable[[], Seconds]:
    """``from_pretrained`` and ``generate``, in a process of their own."""

    def turn() -> Seconds:
        began = time.perf_counter()
        command = [sys.executable, "-P", str(HERE / "load_peer.py"), str(folder), DTYPE]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
        total = time.perf_counter() - began
        parts = json.loads(said.splitlines()[-1])
        return {**parts, "total": total} | {"start": total - parts["read"] - parts["first token"]}

    return turn


def by_merging(save: Path) -> Callable[[], Seconds]:
    """DeepSpeed's script that the save came with, and then ``from_pretrained``."""

    def turn() -> Seconds:
        with tempfile.TemporaryDirectory(dir=save.parent) as merged:
            began = time.perf_counter()
            command = [sys.executable, str(save / "zero_to_fp32.py"), str(save), merged, "--safe_serialization"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            taken = time.perf_counter() - began
            shutil.copy(save / "config.json", merged)
            parts = by_transformers(Path(merged))()
        return parts | {"merge": taken, "total": parts["total"] + taken}

    return turn


def compare(
    contenders: Mapping[str, Callable[[], Seconds]], folders: Sequence[Path], turns: int, *, cold: bool
) -> dict[str, Seconds]:
    """Median seconds of each contender's parts, over ``turns`` rounds."""
    taken: dict[str, list[Seconds]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, turn in contenders.items():
            for folder in folders:
                (drop_from_page_cache if cold else fetch_into_page_cache)(folder)
            taken[name].append(turn())
    for each in (each for rounds in taken.values() for each in rounds):
        each["answer"] = each["read"] + each["first token"]
    return {
        name: {part: statistics.median(each[part] for each in rounds) for part in rounds[0]} for name, rounds in taken.items()
    }


def measure_speed(work: Path, turns: int, cold: bool, keep: Callable[[str, Any], None], console: Console) -> None:
    """All comparisons; ``keep`` is called with what each cell found."""
    save, whole, cut = work / "zero3", work / "hf", work / "hf-cut"
    cells: dict[str, tuple[dict[str, Callable[[], Seconds]], list[Path], str, float]] = {
        "ZeRO-3 to the first token": (
            {"tessera, 2 ranks": by_tessera(save, 2), "zero_to_fp32.py, from_pretrained": by_merging(save)},
            [save], "total", 3.0,
        ),
        "Hugging Face folder": (
            {"tessera, 1 rank": by_tessera(whole, 1), "from_pretrained": by_transformers(whole)}, [whole], "answer", 1.0,
        ),
        "cut for two ranks": (
            {"cut, 2 ranks": by_tessera(cut, 2), "whole, 2 ranks": by_tessera(whole, 2)}, [cut, whole], "read", 1.3,
        ),
    }  # fmt: skip
    for name, (contenders, folders, part, bar) in cells.items():
        seconds = compare(contenders, folders, turns, cold=cold)
        ours, theirs = seconds.values()
        ratios = {each: theirs[each] / ours[each] for each in ("read", "answer", "total")}
        keep(name, {"seconds": seconds, "times as fast": ratios, "compared": part, "bar": bar})
        said = ", ".join(f"{each} {ratio:.2f}" for each, ratio in ratios.items())
        show(name, seconds, f"times as fast: {said}; the bar is {bar} for {part}", console)


def earlier_cells(out: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """What a file already has, beside which some of its cells are measured again; nothing where there is no file.

    Raises:
        ValueError: its figures are of something else, another machine or other versions.
    """
    if not out.exists():
        return {}
    found = json.loads(out.read_text(encoding="utf-8"))
    for key in ("what", "hardware", "versions"):
        if found.get(key) != record[key]:
            rule = f"its {key} is {found.get(key)!r}, and what would be measured is of {record[key]!r}"
            raise ValueError(f"{out} has other figures: {rule}; say --out with another file")
    cells: dict[str, Any] = found["cells"]
    return cells


def show(title: str, seconds: Mapping[str, Seconds], verdict: str, console: Console) -> None:
    """Print one cell."""
    parts = ["merge", "start", "read", "first token", "answer", "total"]
    table = Table("seconds", *parts, title=title, caption=verdict)
    for name, each in seconds.items():
        table.add_row(name, *(f"{each[part]:.2f}" if part in each else "" for part in parts))
    console.print(table)


def main() -> int:
    """Run the benchmark, print it, and record it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(".cache/load"), help="where saves are made and kept (.cache/load)")
    parser.add_argument("--turns", type=int, default=3, help="of each contender (3)")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each turn")
    parser.add_argument("--memory", action="store_true", help="peak memory of the ranks and bytes read, for every layout")
    parser.add_argument("--layouts", nargs="+", choices=list(CASES), default=list(CASES), help="of --memory; all")
    parser.add_argument("--out", type=Path, help="result file; default: benchmarks/results/load[-memory|-cold]-cpu-<date>.json")
    options = parser.parse_args()
    console = Console(width=110)
    work = options.work.resolve()
    kind = "load-memory" if options.memory else "load-cold" if options.cold else "load"
    out = options.out or RESULTS / f"{kind}-cpu-{datetime.datetime.now(datetime.UTC).date()}.json"
    cells: dict[str, Any] = {}
    record = {
        "what": "405 million parameters in Pythia-410M's shape, saved by 4 ranks, served in bfloat16; medians of "
        f"{options.turns} turns; the files are {'not ' if options.cold else ''}in the page cache",
        "hardware": f"{inventory.cpu_description()}, {inventory.usable_cores()} cores, {inventory.memory_bytes() >> 30} GiB",
        "versions": {name: inventory.version_of(name) for name in ("torch", "transformers", "deepspeed")},
        "cells": cells,
    }

    def keep(name: str, found: Any) -> None:
        cells[name] = found
        out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    if options.memory:
        record["what"] = " ".join((measure_memory.__doc__ or "").split())
        if set(options.layouts) < set(CASES):
            try:
                cells |= earlier_cells(out, record)
            except ValueError as error:
                parser.error(str(error))
        measure_memory(work, options.layouts, lambda names: make_saves(work, names), keep, console)
    else:
        make_saves(work, ["zero3", "hf"])
        measure_speed(work, options.turns, options.cold, keep, console)
    console.print(f"recorded in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
