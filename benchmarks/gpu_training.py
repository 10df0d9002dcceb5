"""Fine-tuning on one CUDA device with offload, against its forecast: ``make bench-gpu-training``.

Every case is one run of ``tessera-finetune tune`` on text that is made here, of a GPT-NeoX with random weights. In this order,
the cheapest proof first:

* ``exact``: a 125M shape in fp32 and bf16, with nothing offloaded and with each way of offloading; recorded is how far each
  one's losses are from those with nothing offloaded. One is stopped half way and resumed.
* ``ways``: a 1.4B shape with each way of offloading the optimizer, and how many times as fast as the plain one it is.
* ``fits``: larger shapes; peaks of device and host memory beside the forecast of the same run, and tokens a second. One has no
  more than a part of the device, which its states alone would overfill.
* ``rows``: the 125M shape on packed rows, with samples kept apart by a mask and by their lengths, and with the fused loss.
* ``disk``: the optimizer's state on NVMe: how fast DeepSpeed's file access is in that folder, and what a step reads and writes
  of it. And that a file that asks for GPUDirect Storage is refused.

At the head of the record is what the machine is (``gpu_machine``): versions, ``tessera-finetune doctor``, copies between pinned
memory and the device, and DeepSpeed's CPU Adam. Each run has the device's busy share in its steps (``gpu_watch``).

The record is written anew after each case. All of it ends within ``--minutes``. Each part has a share of them (``MINUTES``),
after which none of its cases begins: those are recorded as not run, and ``--parts`` makes them in another call. A case has what
is left of its part and a minute more, at most a quarter of an hour: one that takes longer is ended and recorded as failed, with
what it had. ``--rehearse`` makes the same runs with tiny shapes on the CPU; what needs CUDA, or differs in fp32 alone, is
recorded as left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from benchmarks.gpu_machine import machine
from benchmarks.gpu_record import result_file, why, write
from benchmarks.gpu_watch import Use, Watch, use_of
from finetune.forecast.memory import CONTEXT_BYTES
from finetune.machine.nvme import MEASURED as DISK_MEASURED
from finetune.output.folder import LOG
from finetune.output.log import read_log
from finetune.output.records import FORECAST, MEASURED, read_json
from serve.worker.gpus import uuid_of

ROOT: Final = Path(__file__).resolve().parents[1]

Tree = dict[str, dict[str, Any]]
"""A run's file: sections of keys."""
Row = dict[str, Any]


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
TINY_ON_DISK: Final = shape(2, 128, 2, 1024)
"""Smaller tensors stay in memory."""
CASE_SECONDS: Final = 900.0
"""No case takes longer."""
LATE_SECONDS: Final = 60.0
"""What began in a part's time has so long after it."""
MINUTES: Final = {"exact": 3.0, "ways": 2.0, "fits": 2.5, "rows": 1.0, "disk": 1.0}
"""Of ten, less half of one, what each part has; of more or fewer in proportion, and what one leaves the next ones have."""

PLAIN: Final[Tree] = {"zero": {"stage": 1}}
OPTIMIZER: Final[Tree] = {"zero": {"stage": 3}, "offload": {"optimizer": "cpu"}}
BOTH: Final[Tree] = {"zero": {"stage": 3}, "offload": {"optimizer": "cpu", "parameters": "cpu"}}
TWIN_FLOW: Final[Tree] = {"zero": {"stage": 3}, "offload": {"optimizer": "cpu", "ratio": 0.5}}
ZENFLOW: Final[Tree] = {"zero": {"stage": 2}, "offload": {"optimizer": "cpu", "method": "zenflow"}}
SUPEROFFLOAD: Final[Tree] = {
    "zero": {"stage": 3}, "offload": {"optimizer": "cpu", "method": "superoffload"}, "optimizer": {"clip": 0.0},
}  # fmt: skip
DISK: Final[Tree] = {"zero": {"stage": 3}, "offload": {"optimizer": "nvme", "parameters": "cpu"}}
DIRECT: Final[Tree] = DISK | {"aio": {"use_gds": True}}
"""As DeepSpeed's own configuration asks for GPUDirect Storage; Tessera offers none (docs/training/memory.md)."""
REFUSED: Final = 2
"""Exit code of a command that refuses a run's file."""


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
    activations: dict[str, str] = field(default_factory=lambda: {"checkpoint": "device"})
    needs_cuda: bool = False
    nears: str = ""
    """The case whose losses its own are compared with."""
    beats: str = ""
    """The case whose seconds a step its own are compared with."""
    packed: bool = False
    """Whether rows are packed of short samples, which are kept apart."""
    resumed: bool = False
    """Whether it goes on from its half, as one that was killed."""
    device_gib: float = 0.0
    """What it may take of the device; 0 for all."""
    refused: str = ""
    """What the message says by which it must be refused."""


def cases() -> Iterator[Case]:
    """All of them, in their order."""
    small: dict[str, Any] = {"steps": 12, "micro": 2, "length": 512}
    for precision in ("fp32", "bf16"):
        reference = f"nothing offloaded, {precision}"
        kept: dict[str, Any] = {"precision": precision, "activations": {"checkpoint": "none"}, **small}
        yield Case("exact", reference, "125M", PLAIN, **kept)
        yield Case("exact", f"both offloaded, {precision}", "125M", BOTH, nears=reference, **kept)
        yield Case("exact", f"Twin-Flow offloaded, {precision}", "125M", TWIN_FLOW, nears=reference, **kept)
        on_host = kept | {"activations": {"checkpoint": "cpu"}}
        yield Case("exact", f"inputs of blocks on the host, {precision}", "125M", PLAIN, nears=reference, **on_host)
    reference = "nothing offloaded, bf16"
    yield Case("exact", "both offloaded, resumed, bf16", "125M", BOTH, nears=reference, resumed=True, **kept)
    clipped: Tree = SUPEROFFLOAD | {"optimizer": {}}  # as what it is compared with; then nothing overlaps
    yield Case("exact", "SuperOffload, bf16", "125M", clipped, nears=reference, needs_cuda=True, **small)
    plain = "1.4B, optimizer"
    for name, way in (("optimizer", OPTIMIZER), ("Twin-Flow", TWIN_FLOW), ("ZenFlow", ZENFLOW), ("SuperOffload", SUPEROFFLOAD)):
        beats = "" if name == "optimizer" else plain
        yield Case("ways", f"1.4B, {name}", "1.4B", way, steps=10, micro=4, needs_cuda=name == "SuperOffload", beats=beats)
    most: Tree = {"zero": {"stage": 3}, "offload": {"optimizer": "cpu", "ratio": 0.6}}
    yield Case("fits", "6.9B, weights on the device, 0.6 of the optimizer offloaded", "6.9B", most, steps=5)
    yield Case("fits", "2.8B, both offloaded, 24 GiB of the device", "2.8B", BOTH, micro=2, device_gib=24.0)
    yield Case("fits", "1.4B, both offloaded", "1.4B", BOTH, micro=4)
    by_mask = "packed rows, by a mask"
    rows: dict[str, Any] = {"steps": 12, "micro": 4, "packed": True}
    kinds = {"by a mask": {}, "by lengths": {"packed_attention": "varlen"}, "fused loss": {"loss": "fused"}}
    for name, what in kinds.items():
        activations, alone = {"checkpoint": "none", "packed_attention": "mask"} | what, not what
        beside = "" if alone else by_mask
        yield Case(
            "rows", f"packed rows, {name}", "125M", PLAIN,
            activations=activations, nears=beside, beats=beside, needs_cuda=not alone, **rows,
        )  # fmt: skip
    yield Case("disk", "1.4B, optimizer on NVMe", "1.4B", DISK, micro=4, beats="1.4B, both offloaded")
    yield Case("disk", "GPUDirect Storage, which is refused", "125M", DIRECT, refused="unknown key aio")


def steps_of(case: Case, *, rehearse: bool) -> int:
    """How many it takes."""
    return 4 if rehearse else case.steps


def tree_of(case: Case, folder: Path, text: Path, *, rehearse: bool) -> Tree:
    """The file of a run."""
    steps, tiny = steps_of(case, rehearse=rehearse), TINY_ON_DISK if case.part == "disk" else TINY
    tree: Tree = {
        "model": {"new": tiny if rehearse else SHAPES[case.shape]},
        "tokenizer": {"train": {"vocab_size": 512}},
        "data": {"train": str(text), "seq_len": 64 if rehearse else case.length, "eval_fraction": 0},
        "batch": {"micro": case.micro},
        "activations": dict(case.activations),
        "schedule": {"steps": steps},
        # Of what is kept, and one more while it is written, a run must have room on the disk.
        "save": {
            "resume_state": case.resumed,
            "every": steps // 2 if case.resumed else steps,
            "keep": 2 if case.resumed else 1,
        },
        "log": {"every": 1, "report": False},
        "run": {"output": str(folder / "run"), "device": "cpu" if rehearse else "cuda", "precision": case.precision},
        **case.way,
    }
    if case.packed:
        tree["data"] |= {"packing": "isolate", "train": str(text.with_suffix(".jsonl")), "too_long": "drop"}
    if case.part == "disk":
        tree["offload"] = tree["offload"] | {"path": str(folder / "nvme")}
    return tree


def run(
    case: Case, folder: Path, text: Path, seconds: float, *, rehearse: bool, use: Use | str = "not told: nobody was asked"
) -> Row:
    """Make the run, in at most so many seconds; its figures, or why there are none.

    Args:
        use: of the device, as it is just now, or why it is not known.
    """
    ends, output, config = time.monotonic() + seconds, folder / "run", folder / "run.json"
    config.write_text(json.dumps(tree_of(case, folder, text, rehearse=rehearse)))
    environment, warming = dict(os.environ), 1 if rehearse else 2  # the first allocate, and compile
    if case.device_gib and not rehearse:
        share = min(1.0, case.device_gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)
        environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)  # which torch would read in its place
        environment["PYTORCH_ALLOC_CONF"] = f"per_process_memory_fraction:{share:.4f}"
    watch = Watch(output / LOG, range(warming, steps_of(case, rehearse=rehearse)), use, with_disk=case.part == "disk")
    for words in (["tune", str(config)], ["tune", str(config), "--resume"])[: 2 if case.resumed else 1]:
        if "--resume" in words:
            forget_the_end(output)
        command, left = [sys.executable, "-m", "finetune", *words], max(1.0, ends - time.monotonic())
        try:  # one that goes on has taken steps before it begins
            with nullcontext() if "--resume" in words else watch.looking():
                done = subprocess.run(
                    command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=left, check=False
                )
        except subprocess.TimeoutExpired:
            return {"failed": f"it took longer than the {seconds:.0f} s it had", "limit_seconds": seconds}
        if case.refused:
            return refusal(case, done.returncode, done.stderr)
        if done.returncode != 0:
            return {"failed": (done.stderr or done.stdout).strip()[-500:]}
    found = figures(output, warming) | watch.busy()
    if case.part == "disk":
        found |= file_access(folder / "nvme" / DISK_MEASURED) | watch.moved()
    return found


def refusal(case: Case, code: int, said: str) -> Row:
    """What became of a run that must be refused before it begins, in a message of one line."""
    told: Row = {"exit_code": code, "message": said.strip()[-500:]}
    is_clean = code == REFUSED and case.refused in said and len(said.strip().splitlines()) == 1
    return {"refused": told} if is_clean else {"failed": f"it was not refused by {case.refused!r}", "ended": told}


def file_access(measured: Path) -> Row:
    """How fast DeepSpeed's file access reads and writes where the run had its swap files, with the settings that it took.

    Args:
        measured: the file in which the run keeps it, once for a folder.
    """
    told = read_json(measured)
    if told is None:
        return {"failed": f"the run left no {measured.name}"}
    gb = {name: told.pop(f"{name}_gib_s") * 2**30 / 1e9 for name in ("read", "write")}
    return {"file_access": {f"{name}_gb_s": rate for name, rate in gb.items()} | told}


def figures(output: Path, warming: int) -> Row:
    """What a run tells of itself: seconds and tokens a second of its steps, memory beside its forecast, and its losses.

    Args:
        warming: steps at its begin whose seconds do not count.
    """
    # A run that went on has some steps twice, of which the later ones count.
    lines = list({line["step"]: line for line in read_log(output / LOG) if "loss" in line}.values())
    timed = lines[warming:]
    found: Row = {name: statistics.median(line[name] for line in timed) for name in ("step_seconds", "all_tokens_per_second")}
    found["mean_step_seconds"] = statistics.mean(line["step_seconds"] for line in timed)
    said, seen = (read_json(output / name) or {} for name in (FORECAST, MEASURED))
    for key in ("device_bytes", "host_bytes"):
        if said.get(key) and seen.get(key):
            found[key] = beside(said[key], seen[key])
    if seen.get("device_reserved_bytes"):  # by this run alone, whoever else is on the device
        found["device_reserved_bytes"] = beside(said["device_bytes"] - CONTEXT_BYTES, seen["device_reserved_bytes"])
    return found | {"losses": [line["loss"] for line in lines]}


def beside(forecast: float, measured: float) -> Row:
    """A forecast and what was measured, with their difference as a share of the latter."""
    return {"forecast": forecast, "measured": measured, "difference": (forecast - measured) / measured}


def forget_the_end(output: Path) -> None:
    """Leave of a run that saved half way and at its end what it would have left, had it been killed between the two."""
    for root in ("checkpoints", "resume"):
        first, last = sorted(path for path in (output / root).iterdir() if path.name.startswith("step-"))
        shutil.rmtree(last)
        (output / root / "latest").write_text(f"{first.name}\n")


def make_text(path: Path, *, megabytes: float) -> Path:
    """Seeded words, a sentence a line; and samples of them in a file of the same name, a line of JSON each."""
    draw = random.Random(1)
    words = [f"{a}{b}" for a in ("re", "un", "in", "ex", "pro") for b in ("port", "tend", "form", "cede", "ject", "act")]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1e6:
            file.write(" ".join(draw.choices(words, k=12)) + "\n")
    with path.with_suffix(".jsonl").open("w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1e6:
            file.write(json.dumps({"text": " ".join(draw.choices(words, k=draw.randrange(4, 40)))}) + "\n")
    return path


def shared_out(parts: Collection[str], begins: float, ends: float) -> dict[str, float]:
    """The moment after which no case of a part begins, in the parts' order; the last one's is the end."""
    given = {part: minutes for part, minutes in MINUTES.items() if part in parts}
    until = itertools.accumulate(given.values())
    return {part: begins + (ends - begins) * each / sum(given.values()) for part, each in zip(given, until, strict=True)}


def measured(
    wanted: list[Case],
    scratch: Path,
    text: Path,
    ends: float,
    *,
    rehearse: bool,
    use: Use | str = "not told: nobody was asked",
    until: Mapping[str, float] | None = None,
) -> Iterator[Row]:
    """Each case's row, as it is done.

    Args:
        use: see ``run``.
        until: of a part, the monotonic time after which none of its cases begins; ``ends`` of one that is not named.
    """
    losses: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    for number, case in enumerate(wanted):
        row: Row = {"part": case.part, "case": case.name, "shape": "tiny" if rehearse else case.shape}
        if rehearse and (case.needs_cuda or case.precision == "fp32"):
            yield row | {"left_out": "it needs a CUDA device" if case.needs_cuda else "rehearsed in bf16"}
            continue
        now, last = time.monotonic(), (until or {}).get(case.part, ends)
        left = min(ends, last + LATE_SECONDS) - now
        if now >= last:
            yield row | {"not_run": f"its time was over: --parts {case.part}"}
            continue
        with tempfile.TemporaryDirectory(dir=scratch, prefix=f"{number}-") as folder:
            try:
                row |= run(case, Path(folder), text, min(CASE_SECONDS, left), rehearse=rehearse, use=use)
            except Exception as error:  # whatever a run left of itself, the others are made
                row["failed"] = why(error)
        losses[case.name] = row.get("losses", [])
        if case.nears and losses.get(case.nears) and row.get("losses"):
            pairs = list(zip(row["losses"], losses[case.nears], strict=False))
            row["furthest_loss"] = max(abs(mine - others) for mine, others in pairs)
            if len(row["losses"]) != len(losses[case.nears]):
                row["failed"] = f"it has the losses of {len(row['losses'])} steps, and the other of {len(losses[case.nears])}"
        if "mean_step_seconds" in row:  # ZenFlow's every fourth step takes longer
            seconds[case.name] = row["mean_step_seconds"]
            if case.beats in seconds:
                row["times_as_fast"] = seconds[case.beats] / row["mean_step_seconds"]
        yield row


def main() -> int:
    """``python -m benchmarks.gpu_training``; 1 where a case failed."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU: whether it works, not how fast")
    parser.add_argument("--parts", nargs="+", choices=tuple(MINUTES), help="all")
    parser.add_argument("--minutes", type=float, default=9.5, help="all cases end within them (9.5)")
    parser.add_argument("--work", type=Path, help="a folder with room for the saves, and for what goes to NVMe; default: /tmp")
    parser.add_argument(
        "--out", type=Path, help="result file; default: benchmarks/results/gpu-training-<date>.json, not of a rehearsal"
    )
    args = parser.parse_args()
    out = result_file(parser, args, "gpu-training")
    ends = time.monotonic() + 60 * args.minutes
    record: Row = {
        "what": "fine-tuning on one device with offload (benchmarks/gpu_training.py)", "rehearsal": args.rehearse,
        "hardware": "CPU" if args.rehearse else torch.cuda.get_device_name(),
        "machine": machine(ends - time.monotonic(), rehearse=args.rehearse), "cases": [],
    }  # fmt: skip
    console = Console()
    console.print_json(json.dumps(record["machine"]))
    failed = "failed" in record["machine"]["speeds"] or "failed" in record["machine"]["doctor"]
    use = "not told: a rehearsal has no GPU" if args.rehearse else use_of(uuid_of(torch.device("cuda", 0)))
    with tempfile.TemporaryDirectory(dir=args.work) as name:
        text = make_text(Path(name) / "text.txt", megabytes=0.2 if args.rehearse else 12)
        wanted = [case for case in cases() if not args.parts or case.part in args.parts]
        until = {} if args.rehearse else shared_out({case.part for case in wanted}, time.monotonic(), ends)
        for row in measured(wanted, Path(name), text, ends, rehearse=args.rehearse, use=use, until=until):
            record["cases"].append(row)
            failed |= "failed" in row
            console.print_json(json.dumps(row))
            if out is not None:
                write(out, record)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
