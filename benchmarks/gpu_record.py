"""The record of a benchmark on a GPU: written anew after each cell, ended by the clock if need be, and held to its bars."""

from __future__ import annotations

import argparse
import datetime
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

    Ends the program, with what is wrong, where no device is and it is no rehearsal, or where that folder is not there.
    """
    if not args.rehearse and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --rehearse runs it on the CPU")
    out: Path | None = args.out or (None if args.rehearse else RESULTS / f"{stem}-{datetime.date.today()}.json")
    if out is not None and not out.parent.is_dir():
        parser.error(f"--out: {out.parent} is no folder")
    return out


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
            self.close()
            print("the time was over while a cell was measured; all others are recorded", file=sys.stderr, flush=True)
            shutil.rmtree(scratch, ignore_errors=True)
            end(ENDED)

        timer = threading.Timer(max(0.0, moment - time.monotonic()), over)
        timer.daemon = True
        timer.start()

    def _write(self) -> None:
        if self._out is None:
            return
        with self._lock:
            beside = self._out.with_name(self._out.name + ".part")
            beside.write_text(json.dumps(self._told, indent=1) + "\n")
            beside.replace(self._out)


BARS: Final = {
    "batch 1: least share of the memory's limit": 0.65,
    "batch 256: least share of the memory's limit": 0.5,
    "least tokens a second by those of continuous batching": 3.0,
    "most waiting of the device for the host": 0.1,
}
"""What decoding is held to, launched ahead as the server does it, in every context of a shape."""


def bars_of(shapes: Mapping[str, Sequence[Row]]) -> dict[str, Row]:
    """What was measured of each bar, by shape, and whether it was met; ``None`` where nothing was measured of it."""
    return {name: _of_shape([row for row in rows if "ahead" in row]) for name, rows in shapes.items()}


def _waiting(row: Row) -> Row:
    """What was told of a row's steps that are launched ahead."""
    told: Row = row.get("waiting", {}).get("ahead", {})
    return told if isinstance(told.get("device_waits"), float) else {}


def _of_shape(rows: Sequence[Row]) -> Row:
    def least_share(batch: int) -> float | None:
        found = [row["ahead"].get("share_of_memory_limit") for row in rows if row["batch"] == batch]
        return min((share for share in found if share is not None), default=None)

    gains = [
        row["ahead"]["tokens_per_second"] / theirs
        for row in rows
        if isinstance(theirs := row.get("transformers", {}).get("continuous_batching"), float)
    ]
    waits = [told["device_waits"] for row in rows if "device_waits" in (told := _waiting(row))]
    found = (least_share(1), least_share(256), min(gains, default=None), max(waits, default=None))
    bars: Row = {}
    for (name, bar), measured in zip(BARS.items(), found, strict=True):
        is_met = None if measured is None else measured < bar if name.startswith("most") else measured >= bar
        bars[name] = {"measured": measured, "bar": bar, "met": is_met}
    return bars
