"""Fine-tuning on one CUDA device with offload, against its forecast: ``make bench-gpu-training``.

Every case is one run of ``tessera-finetune tune`` on text that is made here, of a GPT-NeoX with random weights. In this order,
the cheapest proof first:

* ``exact``: a 125M shape in fp32 and bf16, with nothing offloaded and with each way of offloading; recorded is how far each
  one's losses are from those with nothing offloaded.
* ``fits``: larger shapes; peaks of device and host memory beside the forecast of the same run, and tokens a second.
* ``disk``: the optimizer's state on NVMe.
* ``ways``: one shape with each way of offloading the optimizer, beside one another: what each gains.

The record is written anew after each case. All of it ends within ``--minutes``: a case has what is left of them, at most a
quarter of an hour. One that takes longer is ended and recorded as failed, with what it had; those after the end are recorded as
not run. ``--rehearse`` makes the same runs with tiny shapes on the CPU; what needs a CUDA device, or differs in fp32 alone, is
recorded as left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from finetune.output.folder import LOG
from finetune.output.log import read_log
from finetune.output.records import FORECAST, MEASURED, read_json

RESULTS: Final = Path(__file__).resolve().parent / "results"
ROOT: Final = Path(__file__).resolve().parents[1]

Tree = dict[str, dict[str, Any]]
"""A run's file: sections of keys."""


def shape(layers: int, hidden: int, heads: int, vocabulary: int = 50_432) -> dict[str, Any]:
    """A GPT-NeoX."""
    return {
        "model_type": "gpt_neox", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "intermediate_size": 4 * hidden, "vocab_size": vocabulary, "max_position_embeddings": 2048,
    }  # fmt: skip


SHAPES: Final = {
    "125M": shape(12, 768, 12), "1.4B": shape(24, 2048, 16), "2.8B": shape(32, 2560, 32), "6.9B": shape(32, 4096, 32),
}  # fmt: skip
TINY: Final = shape(2, 64, 2, 1024)
CASE_SECONDS: Final = 900.0
"""No case takes longer."""

PLAIN: Final[Tree] = {"zero": {"stage": 1}}
OPTIMIZER: Final[Tree] = {"zero": {"stage": 3}, "offload": {"optimizer": "cpu"}}
BOTH: Final[Tree] = {"zero": {"stage": 3}, "offload": {"optimizer": "cpu", "parameters": "cpu"}}
TWIN_FLOW: Final[Tree] = {"zero": {"stage": 3}, "offload": {"optimizer": "cpu", "ratio": 0.5}}
ZENFLOW: Final[Tree] = {"zero": {"stage": 2}, "offload": {"optimizer": "cpu", "method": "zenflow"}}
SUPEROFFLOAD: Final[Tree] = {
    "zero": {"stage": 3}, "offload": {"optimizer": "cpu", "method": "superoffload"}, "optimizer": {"clip": 0.0},
}  # fmt: skip
DISK: Final[Tree] = {"zero": {"stage": 3}, "offload": {"optimizer": "nvme", "parameters": "cpu"}}


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    part: str
    name: str
    shape: str
    way: Tree
    precision: str = "bf16"
    steps: int = 6
    micro: int = 1
    length: int = 2048
    recomputed: bool = True
    needs_cuda: bool = False
    nears: str = ""
    """The case whose losses its own are compared with."""


def cases() -> Iterator[Case]:
    """All of them, in their order."""
    for precision in ("fp32", "bf16"):
        reference = f"nothing offloaded, {precision}"
        small: dict[str, Any] = {"precision": precision, "steps": 20, "micro": 2, "length": 512, "recomputed": False}
        yield Case("exact", reference, "125M", PLAIN, **small)
        for name, way in (("optimizer", OPTIMIZER), ("both", BOTH), ("Twin-Flow", TWIN_FLOW)):
            yield Case("exact", f"{name} offloaded, {precision}", "125M", way, nears=reference, **small)
        yield Case("exact", f"recomputed, {precision}", "125M", PLAIN, nears=reference, **small | {"recomputed": True})
    superoffload: dict[str, Any] = {"steps": 20, "micro": 2, "length": 512, "needs_cuda": True}
    clipped: Tree = SUPEROFFLOAD | {"optimizer": {}}  # as what it is compared with; then nothing overlaps
    yield Case("exact", "SuperOffload, bf16", "125M", clipped, nears="nothing offloaded, bf16", **superoffload)
    yield Case("fits", "1.4B, both offloaded", "1.4B", BOTH, micro=4)
    yield Case("fits", "2.8B, both offloaded", "2.8B", BOTH, micro=2)
    kept: Tree = {"zero": {"stage": 3}, "offload": {"optimizer": "cpu", "ratio": 0.6}}
    yield Case("fits", "6.9B, weights on the device, 0.6 of the optimizer offloaded", "6.9B", kept, steps=5)
    yield Case("disk", "1.4B, optimizer on NVMe", "1.4B", DISK, micro=4)
    for name, way in (("optimizer", OPTIMIZER), ("Twin-Flow", TWIN_FLOW), ("ZenFlow", ZENFLOW), ("SuperOffload", SUPEROFFLOAD)):
        yield Case("ways", f"1.4B, {name}", "1.4B", way, steps=12, micro=4, needs_cuda=name == "SuperOffload")


def run(case: Case, folder: Path, text: Path, seconds: float, *, rehearse: bool) -> dict[str, Any]:
    """Make the run, in at most so many seconds; its figures, or why there are none."""
    output = folder / "run"
    tree: Tree = {
        "model": {"new": TINY if rehearse else SHAPES[case.shape]},
        "tokenizer": {"train": {"vocab_size": 512}},
        "data": {"train": str(text), "seq_len": 64 if rehearse else case.length, "eval_fraction": 0},
        "batch": {"micro": case.micro},
        "activations": {"checkpoint": "device" if case.recomputed else "none"},
        "schedule": {"steps": 4 if rehearse else case.steps},
        "save": {"resume_state": False},
        "log": {"every": 1, "report": False},
        "run": {"output": str(output), "device": "cpu" if rehearse else "cuda", "precision": case.precision},
        **case.way,
    }
    if case.part == "disk":
        tree["offload"] = tree["offload"] | {"path": str(folder / "nvme")}
    config = folder / "run.json"
    config.write_text(json.dumps(tree))
    words = [sys.executable, "-m", "finetune", "tune", str(config)]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"it took longer than the {seconds:.0f} s it had", "limit_seconds": seconds}
    if done.returncode != 0:
        return {"failed": (done.stderr or done.stdout).strip()[-500:]}
    lines = [line for line in read_log(output / LOG) if "loss" in line]
    timed = lines[1:] if rehearse else lines[2:]  # the first allocate, and compile
    found: dict[str, Any] = {
        name: statistics.median(line[name] for line in timed) for name in ("step_seconds", "all_tokens_per_second")
    }
    said, seen = (read_json(output / name) or {} for name in (FORECAST, MEASURED))
    for key in ("device_bytes", "host_bytes"):
        if said.get(key) and seen.get(key):
            forecast, measured = said[key], seen[key]
            found[key] = {"forecast": forecast, "measured": measured, "difference": (forecast - measured) / measured}
    return found | {"losses": [line["loss"] for line in lines]}


def make_text(path: Path, *, megabytes: float) -> Path:
    """Seeded words, a sentence a line."""
    draw = random.Random(1)
    words = [f"{a}{b}" for a in ("re", "un", "in", "ex", "pro") for b in ("port", "tend", "form", "cede", "ject", "act")]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1e6:
            file.write(" ".join(draw.choices(words, k=12)) + "\n")
    return path


def measured(wanted: list[Case], scratch: Path, text: Path, ends: float, *, rehearse: bool) -> Iterator[dict[str, Any]]:
    """Each case's row, as it is done."""
    losses: dict[str, list[float]] = {}
    for number, case in enumerate(wanted):
        row: dict[str, Any] = {"part": case.part, "case": case.name, "shape": "tiny" if rehearse else case.shape}
        if rehearse and (case.needs_cuda or case.precision == "fp32"):
            yield row | {"left_out": "it needs a CUDA device" if case.needs_cuda else "rehearsed in bf16"}
            continue
        left = ends - time.monotonic()
        if left <= 0:
            yield row | {"not_run": "the time was over"}
            continue
        with tempfile.TemporaryDirectory(dir=scratch, prefix=f"{number}-") as folder:
            row |= run(case, Path(folder), text, min(CASE_SECONDS, left), rehearse=rehearse)
        losses[case.name] = row.get("losses", [])
        if case.nears and losses.get(case.nears) and row.get("losses"):
            pairs = zip(row["losses"], losses[case.nears], strict=True)
            row["furthest_loss"] = max(abs(mine - others) for mine, others in pairs)
        yield row


def main() -> int:
    """``python -m benchmarks.gpu_training``; 1 where a case failed."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU: whether it works, not how fast")
    parser.add_argument("--parts", nargs="+", choices=("exact", "fits", "disk", "ways"), help="all")
    parser.add_argument("--minutes", type=float, default=10.0, help="all cases end within them (10)")
    parser.add_argument("--work", type=Path, help="a folder with room for the saves, and for what goes to NVMe; default: /tmp")
    parser.add_argument(
        "--out", type=Path, help="result file; default: benchmarks/results/gpu-training-<date>.json, not of a rehearsal"
    )
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --rehearse runs it on the CPU")
    out = args.out or (None if args.rehearse else RESULTS / f"gpu-training-{datetime.date.today()}.json")
    ends = time.monotonic() + 60 * args.minutes
    record: dict[str, Any] = {
        "what": "fine-tuning on one device with offload (benchmarks/gpu_training.py)", "rehearsal": args.rehearse,
        "hardware": "CPU" if args.rehearse else torch.cuda.get_device_name(), "versions": {"torch": torch.__version__},
        "cases": [],
    }  # fmt: skip
    console, failed = Console(), False
    with tempfile.TemporaryDirectory(dir=args.work) as name:
        text = make_text(Path(name) / "text.txt", megabytes=0.2 if args.rehearse else 12)
        wanted = [case for case in cases() if not args.parts or case.part in args.parts]
        for row in measured(wanted, Path(name), text, ends, rehearse=args.rehearse):
            record["cases"].append(row)
            failed |= "failed" in row
            console.print_json(json.dumps(row))
            if out is not None:
                out.write_text(json.dumps(record, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
