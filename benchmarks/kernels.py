"""What the benchmarks of a single kernel for CPUs have in common: options, kernels of a level, and the record of a run."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.serving import RESULTS, machine
from serve.model.kernels.ahead import build_ahead
from serve.model.kernels.build import built_for, load_cpu_kernels

T = TypeVar("T")


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of such a benchmark."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--repeats", type=int, default=15, help="of each cell (15)")
    made.add_argument("--level", help="kernels of this level instead of the processor's best")
    made.add_argument("--threads", type=int, default=2, help="that compute (2)")
    made.add_argument("--beside", metavar="LIBRARY", help="kernels built from other sources, recorded as 'before'")
    made.add_argument("--no-record", action="store_true", help="write no result file")
    return made


@contextmanager
def kernels_of(level: str | None) -> Iterator[ctypes.CDLL]:
    """The kernels of a level, compiled into a folder for the run, or those of the processor's best where none is named."""
    with tempfile.TemporaryDirectory() as scratch:
        yield ctypes.CDLL(str(build_ahead([level], Path(scratch))[0])) if level else load_cpu_kernels()


def taking_turns(library: ctypes.CDLL, beside: str | None) -> dict[str, ctypes.CDLL]:
    """The kernels that are measured, and those of ``--beside``."""
    return {"kernel": library} | ({"before": ctypes.CDLL(beside)} if beside else {})


def in_turns(systems: Mapping[str, T], number: int) -> list[tuple[str, T]]:
    """Who computes in a turn, every other time from the last to the first: what a place in the order gives, all get."""
    turn = list(systems.items())
    return turn if number % 2 else turn[::-1]


def record_of(
    what: str, kernels: ctypes.CDLL, measure: Callable[[torch.dtype], dict[str, dict[str, float]]], **facts: int
) -> dict[str, Any]:
    """Measure both types one after the other; what is kept of the run."""
    load = os.getloadavg()[0]
    return {
        "what": what,
        "date": datetime.date.today().isoformat(),
        "machine": machine("cpu"),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "kernels": built_for(kernels),
        **facts,
        "float32": measure(torch.float32),
        "bfloat16": measure(torch.bfloat16),
        "load_average": {"before": load, "after": os.getloadavg()[0]},
    }


def keep(record: dict[str, Any], kind: str) -> None:
    """Write the result file of today."""
    target = RESULTS / f"{kind}-cpu-{record['date']}.json"
    target.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
