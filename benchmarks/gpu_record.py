"""The record of a benchmark on a GPU: written anew after each cell, ended by the clock if need be, and held to its bars."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

Row = dict[str, Any]
RESULTS: Final = Path(__file__).resolve().parent / "results"
ENDED: Final = 3
"""Exit code of a benchmark that the clock has ended."""


def why(error: BaseException) -> str:
    """What is recorded of a failure: its type, and the beginning of what it says in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def result_file(parser: argparse.ArgumentParser, args: argparse.Namespace, stem: str) -> Path | None:
    """Where a benchmark's record goes: ``--out``, else today's file among the results; nowhere in a rehearsal without it.

    A record of today stays: what is measured later goes to ``<stem>-<date>-2.json``, ``-3`` and so on.

    Ends the program, with what is wrong, where no device is and it is no rehearsal, or where that folder is not there.
    """
    if not args.rehearse and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --rehearse runs it on the CPU")
    out: Path | None = args.out or (None if args.rehearse else _new_file(f"{stem}-{datetime.date.today()}"))
    if out is not None and not out.parent.is_dir():
        parser.error(f"--out: {out.parent} is no folder")
    return out


def _new_file(name: str) -> Path:
    """The first file of that name among the results that is not there."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for each in names if not (path := RESULTS / f"{each}.json").exists())


def write(out: Path, told: Row) -> None:
    """Put a record in the place of what the file holds; who ends the program meanwhile leaves the one or the other whole."""
    beside = out.with_name(out.name + ".part")
    beside.write_text(json.dumps(told, indent=1) + "\n")
    beside.replace(out)


class Record:
    """Rows by model. What is added or put is shown, and is in the file when the call returns."""

    def __init__(self, head: Row, out: Path | None, console: Console) -> None:
        """``out``: the file; ``None`` shows rows alone."""
        self._told = head | {"shapes": {}, "captured": {}}
        self._out, self._console = out, console
        self._lock = threading.Lock()
        """Held while the record changes or is written."""

    def rows(self, name: str) -> list[Row]:
        """Those of a model."""
        found: list[Row] = self._told["shapes"].get(name, [])
        return found

    def captured(self, name: str, taken: Row) -> None:
        """Keep what capturing a model's steps took."""
        with self._lock:
            self._told["captured"].setdefault(name, taken)  # a second time its kernels are compiled

    def add(self, name: str, row: Row) -> None:
        """Add a model's row."""
        with self._lock:
            self._told["shapes"].setdefault(name, []).append(row)
        self._changed(name, row)

    def put(self, name: str, row: Row, key: str, value: object) -> None:
        """Put something into a row that is there."""
        with self._lock:
            row[key] = value
        self._changed(name, row)

    def _changed(self, name: str, row: Row) -> None:
        """Show a row and write the file."""
        self._console.print_json(json.dumps({"shape": name} | row))
        self._write()

    def close(self) -> None:
        """Show and keep what comes of all rows."""
        with self._lock:
            outcome = self.outcome(self._told["shapes"])
            self._told |= outcome
        self._console.print_json(json.dumps(outcome))
        self._write()

    def outcome(self, rows: Mapping[str, Sequence[Row]]) -> Row:
        """What comes of all rows, by model, for the end of the record: here, which bars were met."""
        return {"bars": bars_of(rows)}

    def end_at(self, moment: float, scratch: Path, end: Callable[[int], object] = os._exit) -> None:
        """Have this process end at a monotonic time with what is recorded until then, whatever it does, by ``ENDED``.

        Args:
            scratch: a folder that is removed first.
        """

        def over() -> None:
            with self._lock:
                self._told["ended"] = "by the clock: what was measured then is not recorded"
            try:
                self.close()
                print("the time was over while a cell was measured; all others are recorded", file=sys.stderr, flush=True)
                shutil.rmtree(scratch, ignore_errors=True)
            finally:  # whatever is wrong with the record, nobody waits for this process any longer
                end(ENDED)

        timer = threading.Timer(max(0.0, moment - time.monotonic()), over)
        timer.daemon = True
        timer.start()

    def _write(self) -> None:
        if self._out is None:
            return
        with self._lock:
            write(self._out, self._told)


BATCHING: Final = "continuous_batching"
"""What the names begin with that a peer's continuous batching has in a cell."""
BARS: Final = {
    "batch 1: least share of the memory's limit": 0.65,
    "batch 256: least share of the memory's limit": 0.5,
    "least tokens a second by those of continuous batching": 3.0,
    "most waiting of the device for the host": 0.1,
}
"""What decoding is held to, launched ahead as the server does it, in every context of a shape; of continuous batching to the
fastest way."""


def bars_of(shapes: Mapping[str, Sequence[Row]]) -> dict[str, Row]:
    """What was measured of each bar, by shape, and whether it was met; ``None`` where nothing was measured of it.

    Cells that did not fit, failed or were not run count for nothing, and are named. Smaller weights and caches, whose names
    have a comma, are held to none.
    """
    return {name: _of_shape(rows) for name, rows in shapes.items() if "," not in name}


def fastest_batching(told: Row) -> float | None:
    """The most tokens a second that a peer's continuous batching has of a cell, in whichever way; ``None`` without any."""
    return max((speed for name, speed in told.items() if name.startswith(BATCHING) and isinstance(speed, float)), default=None)


def _of_shape(rows: Sequence[Row]) -> Row:
    def share(row: Row) -> float | None:
        found: float | None = row.get("ahead", {}).get("share_of_memory_limit")
        return found

    def gain(row: Row) -> float | None:
        theirs = fastest_batching(row.get("transformers", {}))
        return row["ahead"]["tokens_per_second"] / theirs if theirs and "ahead" in row else None

    def waiting(row: Row) -> float | None:
        told: float | str | None = row.get("waiting", {}).get("ahead", {}).get("device_waits")
        return told if isinstance(told, float) else None

    of_bars = ((share, 1), (share, 256), (gain, None), (waiting, None))
    bars: Row = {}
    for (name, bar), (of, batch) in zip(BARS.items(), of_bars, strict=True):
        held = [(row, of(row)) for row in rows if batch is None or row["batch"] == batch]
        told, is_most = [value for _, value in held if value is not None], name.startswith("most")
        measured = max(told, default=None) if is_most else min(told, default=None)
        is_met = None if measured is None else measured < bar if is_most else measured >= bar
        lacking = [f"batch {row['batch']}, context {row.get('context')}" for row, value in held if value is None]
        bars[name] = {"measured": measured, "bar": bar, "met": is_met, "not_measured": lacking}
    return bars
