"""Other tiles of the Triton kernels beside those in use, timed on a CUDA device: ``make bench-gpu-tiles``.

A tile is how much a program computes at once, by how many warps, with how many stages of loads under way, and in decoding into
how many splits a sequence's positions are cut. The server chooses one for each kind of launch (``serve/model/cuda/tiling.py``
and ``linear.py``). Tried are, beside it, those that differ from it in one number, and those that differ in two of what is
compiled, in this order: attention in decoding and of prompts at the shapes of well-known models, then layers of whole numbers
at few rows and at many.

A launch is captured in a CUDA graph and replayed on copies of what it reads, more than the device's cache holds, so that its
own time is taken, and no launch's by the host. What it computes is held to what the tile in use computes. Recorded of each tile
are the seconds of each cell, and how many times as fast as the one in use it is: the geometric mean over the kind's cells. At
the end each kind has its fastest tile, what it changes, and whether that is more than measuring twice differs.

Kernels are compiled first, by several processes side by side (``--processes``), for at most the first part of the time; what is
missing then is compiled when it is measured. The record is written anew after each tile. Nothing begins after ``--minutes``,
and what runs a minute later is ended: what was not run is recorded as that, and what a device refuses (no shared memory for it)
as failed. ``--rehearse`` does all of it with tiny shapes and few tiles on the CPU, by Triton's interpreter.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any, Final

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_record import Record, result_file, why
from finetune.machine.inventory import usable_cores, version_of
from finetune.machine.process import die_with_parent

if TYPE_CHECKING:  # which decides whether Triton interprets the kernels, when it is imported
    from benchmarks.gpu_tile_cells import Cell, Kind, Launch, Tile, Where

ROOT: Final = Path(__file__).resolve().parents[1]
LAST_SECONDS: Final = 60.0
"""What began in time has so long after the end."""
COMPILING: Final = 0.45
"""Of the time, for processes that only compile."""
MOST_PROCESSES: Final = 12
PROCESS_BYTES: Final = 6 << 30
"""Of the device's memory, for each of them."""
LEAST_GAIN: Final = 1.03
"""A tile that is less faster than this is not said to be faster, however well two measurements of the one in use agree."""
FURTHEST: Final = 2**-6
"""How far two tiles' results in 16 bits may be apart, as a share of the largest of them: sums are added in another order."""
LAUNCHES: Final = 8
"""Of a graph, at least."""
REPLAYS: Final = 9
"""That are timed, behind one that is not."""
NOT_RUN: Final = "the time was over"
PARTS: Final = ("attention", "layers")

Row = dict[str, Any]


def others(in_use: Tile, axes: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """The tiles that are tried beside one: those that differ in one number, then those that differ in two.

    Splits are not changed together with anything else.
    """
    changes = {name: [number for number in numbers if number != in_use[name]] for name, numbers in axes.items()}
    for name, numbers in changes.items():
        yield from (dict(in_use) | {name: number} for number in numbers)
    for first, second in combinations([name for name in axes if name != "splits"], 2):
        for pair in product(changes[first], changes[second]):
            yield dict(in_use) | dict(zip((first, second), pair, strict=True))


def real() -> list[Kind]:
    """What is tried on a device, the most important first."""
    from benchmarks.gpu_tile_cells import Attention, Linear

    decoding, prompts = ((1, 2048), (8, 2048), (64, 512), (256, 512)), ((1, 2048), (8, 512))
    models = (
        ("Pythia-6.9B", 32, 32, 128, 32), ("Llama-3.1-8B", 32, 8, 128, 128), ("Pythia-160M", 12, 12, 64, 16),
        ("Pythia-2.8B", 32, 32, 80, 20), ("Pythia-1B", 8, 8, 256, 64),
    )  # fmt: skip
    layers = ((12_288, 4096), (16_384, 4096), (4096, 16_384))
    kinds: list[Kind] = []
    for model in models[:2]:
        kinds += [Attention(*model, decoding), Attention(*model, prompts, long=True)]
    kinds += [Linear(name, rows, layers) for rows in ((1, 8), (64, 2048)) for name in ("int8", "int4")]
    if torch.cuda.get_device_capability() >= (8, 9):  # below that nothing computes with fp8
        kinds.append(Attention(*models[0], decoding, fp8=True))
    for model in models[2:]:
        kinds += [Attention(*model, decoding), Attention(*model, prompts, long=True)]
    return kinds


def rehearsal() -> list[Kind]:
    """A little of each."""
    from benchmarks.gpu_tile_cells import Attention, Linear

    decoding = (("splits", (1, 2)), ("num_warps", (4, 8)))
    prompts = (("rows", (64,)), ("positions", (32, 64)))
    return [
        Attention("tiny", 2, 1, 16, 8, ((1, 300), (2, 20)), tried=decoding),
        Attention("tiny", 2, 1, 16, 8, ((1, 20),), long=True, tried=prompts),
        Linear("int8", (3,), ((32, 64),), tried=(("outputs", (16, 32)), ("num_stages", (2,)))),
        Linear("int4", (20,), ((32, 64),), tried=(("spans", (1, 2)),)),
    ]


@dataclass(frozen=True, slots=True)
class Programme:
    """What is tried, and where."""

    kinds: list[Kind]
    where: Where

    @classmethod
    def of(cls, *, rehearse: bool, parts: Sequence[str]) -> Programme:
        """Have Triton interpret kernels where it is rehearsed: the first import of its language decides that."""
        if rehearse:
            os.environ["TRITON_INTERPRET"] = "1"
        from benchmarks.gpu_tile_cells import Where

        kinds = [kind for kind in (rehearsal() if rehearse else real()) if kind.name.partition(" ")[0] in parts]
        if rehearse:
            return cls(kinds, Where("cpu", 8, 0))
        return cls(kinds, Where("cuda", torch.cuda.get_device_properties(0).multi_processor_count, 256 << 20))


class Tiles(Record):
    """Rows by kind: the tile in use first and last, and those beside it between."""

    def outcome(self, rows: Mapping[str, Sequence[Row]]) -> Row:
        """By kind the fastest tile, beside the one in use."""
        return {"fastest": {name: fastest(tried) for name, tried in rows.items()}}


def fastest(rows: Sequence[Row]) -> Row:
    """Of one kind: the fastest tile that computes what the one in use does, what it changes, and whether it is faster.

    Not where it is faster by less than ``LEAST_GAIN``, or than the tile in use differs from itself, measured again.
    """
    counted: Row = {
        name: sum(name in row for row in rows) for name in ("failed", "wrong") if any(name in row for row in rows)
    } | {"not_run": sum(row.get("not_run_tiles", 0) for row in rows)}
    tried = [row for row in rows if "times_as_fast" in row and not row["in_use"]]
    own = [row for row in rows if row.get("in_use") and "tile" in row]
    if not own or not tried:
        return counted | {"measured": len(tried), "told": "nothing was measured beside the tile in use"}
    best = max(tried, key=lambda row: float(row["times_as_fast"]))
    again = own[-1]["times_as_fast"] if len(own) > 1 else None
    noise = max(again, 1 / again) if again else 1.0
    tile = own[0]["tile"]
    return counted | {
        "measured": len(tried), "in_use": tile, "in_use_again": again, "times_as_fast": best["times_as_fast"],
        "changes": {name: [tile[name], number] for name, number in best["tile"].items() if number != tile[name]},
        "by_cell": {name: cell["times_as_fast"] for name, cell in best["cells"].items()},
        "is_faster": best["times_as_fast"] > max(LEAST_GAIN, noise),
    }  # fmt: skip


def seconds_of(launch: Launch, copies: int, device: str) -> float:
    """Of one launch: on a CUDA device its own time there, in a graph that goes through all copies; the median."""
    count = copies * -(-LAUNCHES // copies)
    if device != "cuda":
        began = time.perf_counter()
        launch(0)
        return time.perf_counter() - began
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            launch(number)
    taken = []
    for _ in range(1 + REPLAYS):
        begun, ended = _event(), _event()
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        taken.append(float(begun.elapsed_time(ended)) / 1e3 / count)
    return median(taken[1:])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it unannotated


class Sweep:
    """Kinds one after the other, each with its tiles, until the time is over."""

    def __init__(self, record: Record, where: Where, until: float) -> None:
        """``until``: the monotonic time after which nothing begins."""
        self._record, self._where, self._until = record, where, until

    def run(self, kinds: Sequence[Kind]) -> None:
        """Measure them."""
        for kind in kinds:
            self._kind(kind)
            if self._where.device == "cuda":
                torch.cuda.empty_cache()

    def _kind(self, kind: Kind) -> None:
        in_use = kind.in_use(self._where.processors)
        tiles = list(others(in_use, kind.axes))
        if time.monotonic() > self._until:
            self._record.add(kind.name, {"not_run": NOT_RUN, "not_run_tiles": len(tiles)})
            return
        try:
            cells = kind.cells(self._where)
            expected: dict[str, torch.Tensor] = {}
            first = {cell.name: self._cell(cell, in_use, expected) for cell in cells}
        except Exception as error:  # without what others are held to there is nothing to try; other kinds may do
            self._record.add(kind.name, {"in_use": True, "failed": why(error), "not_run_tiles": len(tiles)})
            return
        self._record.add(kind.name, {"tile": dict(in_use), "in_use": True, "cells": first})
        for number, tile in enumerate(tiles):
            if time.monotonic() > self._until:
                self._record.add(kind.name, {"in_use": False, "not_run": NOT_RUN, "not_run_tiles": len(tiles) - number})
                return
            self._record.add(kind.name, {"tile": tile, "in_use": False} | self._beside(cells, tile, first, expected))
        self._record.add(kind.name, {"tile": dict(in_use), "in_use": True} | self._beside(cells, in_use, first, expected))

    def _beside(self, cells: Sequence[Cell], tile: Tile, first: Row, expected: dict[str, torch.Tensor]) -> Row:
        """A tile in all cells of a kind, or why it cannot be."""
        found: Row = {}
        try:
            for cell in cells:
                told = self._cell(cell, tile, expected)
                if not told["difference"] <= FURTHEST:  # nor where it is no number
                    return {"wrong": f"{cell.name}: its results are {told['difference']:.2g} from those of the tile in use"}
                found[cell.name] = told | {"times_as_fast": first[cell.name]["seconds"] / told["seconds"]}
        except Exception as error:  # it does not compile, or a device has no room for it: others may do
            return {"failed": why(error)}
        return {"cells": found, "times_as_fast": geometric_mean(told["times_as_fast"] for told in found.values())}

    def _cell(self, cell: Cell, tile: Tile, expected: dict[str, torch.Tensor]) -> Row:
        """Seconds, and how far the results are from those that are expected; the first ones are, from then on."""
        with cell.shaped(tile) as launch:
            result = launch(0).float()
            kept = expected.setdefault(cell.name, result)
            if not kept.isfinite().all():
                raise ArithmeticError("the tile in use computes what is no number")
            difference = float((result - kept).abs().max() / kept.abs().max())
            return {"seconds": seconds_of(launch, cell.copies, self._where.device), "difference": difference}


def compile_share(programme: Programme, number: int, of: int) -> int:
    """As one of several processes: launch every so manieth tile of each kind once, which compiles it, and keeps it in a cache.

    What fails here fails again when it is measured, and is recorded then.
    """
    where = replace(programme.where, ring_bytes=0)
    failed = 0
    for kind in programme.kinds:
        in_use = kind.in_use(where.processors)
        try:
            cells = kind.cells(where)
        except Exception as error:
            print(f"{kind.name}: {why(error)}", file=sys.stderr, flush=True)
            failed += 1
            continue
        for tile in [dict(in_use), *others(in_use, kind.axes)][number::of]:
            try:
                for cell in cells:
                    with cell.shaped(tile) as launch:
                        launch(0)
            except Exception as error:
                print(f"{kind.name}, {tile}: {why(error)}", file=sys.stderr, flush=True)
                failed += 1
    return failed


def compilers(*, rehearse: bool) -> int:
    """How many processes compile side by side: as there are cores, and room on the device for what each launches."""
    if rehearse:
        return 1
    room = torch.cuda.get_device_properties(0).total_memory // PROCESS_BYTES
    return int(max(1, min(MOST_PROCESSES, usable_cores(), room)))


def compile_ahead(words: Sequence[str], processes: int, seconds: float, logs: Path) -> Row:
    """Have processes compile, for at most so many seconds; how long they took, and how many came to their end."""
    began = time.monotonic()
    environment = os.environ | {"TESSERA_PARENT": str(os.getpid()), "OMP_NUM_THREADS": "1"}
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(processes):
            command = [sys.executable, "-m", "benchmarks.gpu_tiles", *words, "--compile", str(number), str(processes)]
            with (logs / f"{number}.log").open("wb") as log:
                running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
        for process in running:
            try:
                process.wait(max(0.0, began + seconds - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
    finally:
        for process in running:
            process.kill()
            process.wait()
    failed = [line for log in sorted(logs.glob("*.log")) for line in log.read_text(errors="replace").splitlines()][-20:]
    ended = sum(process.returncode >= 0 for process in running)
    return {"seconds": time.monotonic() - began, "processes": processes, "ended": ended, "said": failed}


def table_of(outcome: Row) -> Table:
    """By kind, for the reader: what would change, and what it is worth."""
    table = Table("kind", "tile in use", "fastest changes", "times as fast", "is faster", show_edge=False)
    for name, told in outcome["fastest"].items():
        if "in_use" not in told:
            table.add_row(name, "", told["told"], "", "")
            continue
        tile = ", ".join(f"{key} {number}" for key, number in told["in_use"].items())
        changes = ", ".join(f"{key} {old} to {new}" for key, (old, new) in told["changes"].items())
        table.add_row(name, tile, changes, f"{told['times_as_fast']:.3f}", "yes" if told["is_faster"] else "no")
    return table


def options() -> argparse.ArgumentParser:
    """Of the command."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU: whether it works, not how fast")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="all")
    parser.add_argument("--processes", type=int, help="that compile first, 0: none; default: by cores and memory")
    parser.add_argument("--minutes", type=float, default=8.5, help="nothing begins later; what runs has one more (8.5)")
    parser.add_argument(
        "--out", type=Path, help="result file; default: benchmarks/results/gpu-tiles-<date>.json, not of a rehearsal"
    )
    parser.add_argument("--compile", nargs=2, type=int, metavar=("NUMBER", "OF"), help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """``python -m benchmarks.gpu_tiles``; 1 where the tile in use failed, or another computes something else."""
    began, parser = time.monotonic(), options()
    args = parser.parse_args()
    out = result_file(parser, args, "gpu-tiles")
    torch.set_grad_enabled(False)
    programme = Programme.of(rehearse=args.rehearse, parts=args.parts)
    if args.compile:
        die_with_parent(int(os.environ["TESSERA_PARENT"]))
        compile_share(programme, *args.compile)
        return 0
    ends, console = began + 60 * args.minutes, Console()
    words = [*(["--rehearse"] if args.rehearse else []), "--parts", *args.parts]
    processes = compilers(rehearse=args.rehearse) if args.processes is None else args.processes
    with tempfile.TemporaryDirectory() as scratch:
        head: Row = {
            "what": "tiles of the Triton kernels beside those in use (benchmarks/gpu_tiles.py)", "rehearsal": args.rehearse,
            "hardware": "CPU" if args.rehearse else torch.cuda.get_device_name(), "processors": programme.where.processors,
            "versions": {name: version_of(name) for name in ("torch", "triton")},
            "compiled": compile_ahead(words, processes, 60 * args.minutes * COMPILING, Path(scratch)),
        }  # fmt: skip
        record = Tiles(head, out, console)
        record.end_at(ends + LAST_SECONDS, Path(scratch))
        Sweep(record, programme.where, ends).run(programme.kinds)
    record.close()
    rows = {kind.name: record.rows(kind.name) for kind in programme.kinds}
    console.print(table_of(record.outcome(rows)))
    return int(any("wrong" in row or ("failed" in row and row["in_use"]) for tried in rows.values() for row in tried))


if __name__ == "__main__":
    sys.exit(main())
