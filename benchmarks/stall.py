"""How long a step waits for an update on the host: DeepSpeed's CPU Adam, torch's fused AdamW, and ZenFlow, in turns.

``python -m benchmarks.stall`` updates 100 million weights. Between two updates the host is left to itself, as while a GPU
computes: as long as one of DeepSpeed's updates, and four times as long. Only the time in which the next step could not go on
counts: the update itself, and waiting until gradients may be overwritten.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from finetune.config import ZenFlowConfig
from finetune.distributed import Peers
from finetune.machine import inventory
from finetune.optimizers.algorithms.zenflow import ZenFlow
from finetune.optimizers.fragments import Fragment

RESULTS: Final = Path(__file__).resolve().parent / "results"
SHAPES: Final = [(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)] * 8
"""Matrices of eight blocks of hidden size 1,024."""
PACES: Final = ZenFlowConfig()
DEVICE_SHARES: Final = (1.0, 4.0)
BETAS: Final = (0.9, 0.95)

Update = Callable[[], float]
"""Makes one update; returns the seconds that were waited for it."""


def _weights(elements: int) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.zeros(elements))
    made.grad = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    return made


def _plain(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], elements: int) -> Update:
    optimizer = make([_weights(elements)])

    def update() -> float:
        began = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - began

    return update


def _zenflow(elements: int) -> Update:
    weights = _weights(elements)
    names = [str(number) for number in range(len(SHAPES))]
    optimizer = ZenFlow(
        [{"params": [weights]}],
        matrices=frozenset(names),
        lr=1e-4,
        betas=BETAS,
        eps=1e-8,
        share=PACES.share,
        update_every=PACES.update_every,
        select_every=PACES.select_every,
    )
    layout, offset = [], 0
    for name, shape in zip(names, SHAPES, strict=True):
        layout.append(Fragment(name=name, shape=shape, start=0, count=shape[0] * shape[1], offset=offset))
        offset += shape[0] * shape[1]
    keys = ("exp_avg", "exp_avg_sq", "put_off", "pending")
    optimizer.state[weights] = {"step": 0, **{key: torch.zeros(elements) for key in keys}}
    optimizer.place({weights: layout}, torch.device("cpu"), Peers.alone())

    def update() -> float:
        began = time.perf_counter()
        optimizer.release_gradients()
        optimizer.step()
        return time.perf_counter() - began

    return update


def _turn(update: Update, count: int, pause: float) -> list[float]:
    seconds = []
    for _ in range(count):
        time.sleep(pause)
        seconds.append(update())
    return seconds


def main() -> int:
    """Print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3, help="of each, one after the other (3)")
    parser.add_argument("--no-record", action="store_true", help="write no result file")
    options = parser.parse_args()
    elements = sum(rows * columns for rows, columns in SHAPES)
    systems = {
        "deepspeed": _plain(lambda weights: DeepSpeedCPUAdam(weights, lr=1e-4, betas=BETAS), elements),
        "torch fused": _plain(lambda weights: torch.optim.AdamW(weights, lr=1e-4, betas=BETAS, fused=True), elements),
        "zenflow": _zenflow(elements),
    }
    for update in systems.values():
        _turn(update, 2, 0.0)
    one = statistics.median(_turn(systems["deepspeed"], 5, 0.0))
    rows = [_compare(systems, share * one, options.turns) for share in DEVICE_SHARES]
    if not options.no_record:
        _record(elements, rows)
    return 0


def _compare(systems: Mapping[str, Update], pause: float, turns: int) -> dict[str, Any]:
    """Mean seconds waited for each, which take turns, and the ratios."""
    means: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(turns):
        for name, update in systems.items():
            # ZenFlow's steps are not alike: a turn is as long as its longest period.
            means[name].append(statistics.mean(_turn(update, PACES.select_every if name == "zenflow" else 16, pause)))
    waited = {name: statistics.median(each) for name, each in means.items()}
    ratios = {name: round(waited["zenflow"] / seconds, 3) for name, seconds in waited.items() if name != "zenflow"}
    print(f"device computes for {pause * 1000:.0f} ms a step")
    for name, seconds in waited.items():
        print(f"  {name:12} {seconds * 1000:7.1f} ms waited a step")
    print(f"  zenflow / others: {ratios}", flush=True)
    return {"device_seconds": pause, "waited_seconds": waited, "zenflow_to": ratios}


def _record(elements: int, rows: list[dict[str, Any]]) -> None:
    facts: dict[str, Any] = {
        "what": "mean seconds a step waits for the update on the host, which is idle while a device would compute",
        "hardware": f"{inventory.cpu_description()}, {inventory.usable_cores()} cores, {inventory.memory_bytes() >> 30} GiB",
        "versions": {name: inventory.version_of(name) for name in ("torch", "deepspeed")},
        "weights": elements,
        "zenflow": asdict(PACES),
        "rows": rows,
    }
    path = RESULTS / f"stall-cpu-{datetime.datetime.now(datetime.UTC).date()}.json"
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
