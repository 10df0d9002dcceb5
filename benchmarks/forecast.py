"""Forecast against measurement: host memory of whole runs on the CPU, one for each kind of configuration.

``python -m benchmarks.forecast [NAME ...]`` trains a few steps with each and records both figures. What is measured is said in
``finetune.machine.memory``. ``--random 30 --seed N`` does it with runs whose shapes are drawn (``benchmarks.random_runs``):
models that the forecast was not made with. ``--time`` compares seconds a step instead, each right after the machine was
measured for it, of smaller runs or, with ``--random``, of drawn ones.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.random_runs import draw_run
from finetune.machine import inventory

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
BAR: Final = 0.10
"""Largest difference of forecast and measurement of memory, as a share of what was measured."""
TIME_BAR: Final = 0.30
"""The same of seconds a step."""


def _model(family: str, hidden: int, layers: int, heads: int, inner: int, vocab: int, **more: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner}
    return {"model_type": family, **sizes, "vocab_size": vocab, **more}


MODELS: Final[dict[str, dict[str, Any]]] = {
    "gpt_neox 46M": _model("gpt_neox", 512, 12, 8, 2048, 8192),
    "llama 68M": _model("llama", 640, 8, 10, 1792, 16384, num_key_value_heads=5),
    "gpt2 6M": {"model_type": "gpt2", "n_embd": 256, "n_layer": 6, "n_head": 4, "vocab_size": 2048},
    "qwen2 8M": _model("qwen2", 256, 8, 4, 704, 4096, num_key_value_heads=2),
    "gpt_neox 7M": _model("gpt_neox", 384, 3, 6, 1536, 2048),
    "llama 3M": _model("llama", 192, 5, 4, 512, 2048, num_key_value_heads=4),
}
NEOX: Final = "gpt_neox 46M"
LLAMA: Final = "llama 68M"

CASES: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "zero1": ("tune", NEOX, {"zero": {"stage": 1}}),
    "zero2": ("tune", NEOX, {"zero": {"stage": 2}}),
    "zero3": ("tune", NEOX, {"zero": {"stage": 3}}),
    "zero3-offload": ("tune", NEOX, {"zero": {"stage": 3}, "offload": {"optimizer": "cpu", "parameters": "cpu"}}),
    "lora": ("tune", NEOX, {"zero": {"stage": 2}, "lora": {"rank": 16}}),
    "pipeline": ("pretrain", NEOX, {"zero": {"stage": 1}, "pipeline": {"stages": 2}, "batch": {"accumulation": 2}}),
    "pipeline-muon": ("pretrain", NEOX, {"zero": {"stage": 1}, "pipeline": {"stages": 2}, "optimizer": {"name": "muon"}}),
    "pipeline-bf16": (
        "pretrain",
        NEOX,
        {"zero": {"stage": 1}, "pipeline": {"stages": 2}, "batch": {"accumulation": 2}, "run": {"precision": "bf16"}},
    ),
    "pipeline-bf16-groups": (
        "pretrain",
        NEOX,
        {"zero": {"stage": 0}, "pipeline": {"stages": 2}, "run": {"precision": "bf16", "ranks": 4}},
    ),
    "zero1-accumulate": ("tune", NEOX, {"zero": {"stage": 1}, "batch": {"accumulation": 2}}),
    "zero2-bf16": ("tune", NEOX, {"zero": {"stage": 2}, "run": {"precision": "bf16"}}),
    "zero2-offload": ("tune", NEOX, {"zero": {"stage": 2}, "offload": {"optimizer": "cpu"}}),
    "zero3-bf16": ("tune", LLAMA, {"zero": {"stage": 3}, "run": {"precision": "bf16"}}),
    "zero1-llama": ("tune", LLAMA, {"zero": {"stage": 1}}),
    "zero3-llama": ("tune", LLAMA, {"zero": {"stage": 3}, "batch": {"micro": 4}}),
    "zero2-muon": ("tune", NEOX, {"zero": {"stage": 2}, "optimizer": {"name": "muon"}}),
    "zero3-adafactor": ("tune", NEOX, {"zero": {"stage": 3}, "optimizer": {"name": "adafactor"}}),
    "zero2-zenflow": ("tune", NEOX, {"zero": {"stage": 2}, "offload": {"optimizer": "cpu", "method": "zenflow"}}),
    "zero3-zenflow": ("tune", NEOX, {"zero": {"stage": 3}, "offload": {"optimizer": "cpu", "method": "zenflow"}}),
    "one-rank": ("tune", LLAMA, {"zero": {"stage": 1}, "run": {"ranks": 1}}),
}
"""Name -> command, model, sections laid over the common ones."""

TIMED: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "time-gpt2": ("tune", "gpt2 6M", {"zero": {"stage": 1}, "run": {"ranks": 1}}),
    "time-gpt2-bf16": ("tune", "gpt2 6M", {"zero": {"stage": 2}, "run": {"precision": "bf16"}, "batch": {"micro": 4}}),
    "time-qwen2-recomputed": ("tune", "qwen2 8M", {"zero": {"stage": 1}, "activations": {"checkpoint": "device"}}),
    "time-neox-zero3": ("tune", "gpt_neox 7M", {"zero": {"stage": 3}}),
    "time-neox-bf16": ("tune", "gpt_neox 7M", {"zero": {"stage": 1}, "run": {"ranks": 1, "precision": "bf16"}}),
    "time-llama-accumulate": ("tune", "llama 3M", {"zero": {"stage": 2}, "batch": {"micro": 2, "accumulation": 3}}),
    "time-llama-long": ("tune", "llama 3M", {"zero": {"stage": 1}, "run": {"ranks": 1}, "data": {"seq_len": 1024}}),
    "time-llama-pipeline": (
        "pretrain",
        "llama 3M",
        {"zero": {"stage": 1}, "pipeline": {"stages": 2}, "batch": {"micro": 2, "accumulation": 4}},
    ),
}
"""The same for seconds a step: small models, where a run takes seconds and the machine changes little meanwhile."""
_WHAT: Final = {
    False: "peak host memory of all ranks together, forecast before the run and measured (finetune/machine/memory.py)",
    True: "seconds of a step: expected from what plan --measure found right before a run, and the run's median; others_cores: "
    "how many cores processes of others used while it was measured and while it ran",
}


def main() -> int:
    """Run the cases; 1 when one of them misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; none: all")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each (6)")
    parser.add_argument("--random", type=int, metavar="N", help="instead, N runs drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn runs (0)")
    parser.add_argument("--first", type=int, default=0, help="number of the first drawn run (0)")
    parser.add_argument("--time", action="store_true", help="instead, seconds a step: measure the machine, run, compare")
    parser.add_argument("--no-record", action="store_true", help="write no result file")
    options = parser.parse_args()
    if options.random is not None and options.cases:
        parser.error("--random takes no names of cases")
    known = TIMED if options.time else CASES
    for name in options.cases:
        if name not in known:
            parser.error(f"unknown case {name!r}; there are {', '.join(known)}")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        text = _write_text(folder / "text.txt")
        runs = options.cases or known
        if options.random is not None:
            runs = [f"{options.seed}/{options.first + number}" for number in range(options.random)]
        for name in runs:
            if options.random is not None:
                run = _drawn(name, text, folder, options.steps)
            else:
                run = _given(name, known, text, folder, options.steps)
            row = run.timed() if options.time else run.weighed()
            rows.append(row)
            print(_line(row), flush=True)
            if not options.no_record:
                _record(row, timed=options.time)
            shutil.rmtree(run.output, ignore_errors=True)
    return int(any("failed" in row or abs(row["difference"]) > (TIME_BAR if options.time else BAR) for row in rows))


def _write_text(path: Path) -> Path:
    draw = random.Random(1)
    words = [f"{a}{b}" for a in ("re", "un", "in", "ex", "pro") for b in ("port", "tend", "form", "cede", "ject", "act")]
    path.write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(6000)), encoding="utf-8")
    return path


@dataclass(frozen=True, slots=True)
class _Run:
    """One run that is forecast, and made."""

    facts: Mapping[str, Any]
    """What its row says of it."""
    command: str
    config: Path
    output: Path

    def weighed(self) -> dict[str, Any]:
        """Make it; memory."""
        done = _command(self.command, self.config)
        if done.returncode != 0:
            return {**self.facts, "failed": (done.stderr or done.stdout).strip()[-500:]}
        said, seen = (json.loads((self.output / file).read_text()) for file in ("forecast.json", "measured.json"))
        return {
            **self.facts,
            "forecast_bytes": said["host_bytes"],
            "measured_bytes": seen["host_bytes"],
            "difference": _difference(said["host_bytes"], seen["host_bytes"]),
            "phase": said["need"]["host_phase"],
            "process_bytes": said["host_items"]["process"] // said["layout"]["ranks"],
        }

    def timed(self) -> dict[str, Any]:
        """Measure the machine for it, make it right after; seconds of a step."""
        planned, measuring = _beside(lambda: _command("plan", self.config, "--measure", "--json", "--command", self.command))
        done, running = _beside(lambda: _command(self.command, self.config))
        if planned.returncode != 0 or done.returncode != 0:
            return {**self.facts, "failed": (planned.stderr + done.stderr).strip()[-500:]}
        expected = json.loads(planned.stdout)
        measured = json.loads((self.output / "pace.json").read_text())["step_seconds"]
        return {
            **self.facts,
            "expected_seconds": round(expected["pace"]["step_seconds"], 4),
            "measured_seconds": round(measured, 4),
            "difference": _difference(expected["pace"]["step_seconds"], measured),
            "others_cores": [round(measuring, 2), round(running, 2)],
            "measured": expected["measured"],
        }


def _difference(forecast: float, measured: float) -> float:
    return round((forecast - measured) / measured, 4)


def _beside(act: Callable[[], subprocess.CompletedProcess[str]]) -> tuple[subprocess.CompletedProcess[str], float]:
    """What a process said, and how many cores the processes of others used meanwhile."""
    began, busy, own = time.monotonic(), _busy_seconds(), _child_seconds()
    done = act()
    return done, max(0.0, _busy_seconds() - busy - (_child_seconds() - own)) / (time.monotonic() - began)


def _busy_seconds() -> float:
    """Of all cores together, since the machine started."""
    user, nice, system, _, _, interrupts, soft, *_ = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _given(name: str, cases: Mapping[str, tuple[str, str, dict[str, Any]]], text: Path, folder: Path, steps: int) -> _Run:
    """A run of the tables above."""
    command, model, sections = cases[name]
    output = folder / name
    tree: dict[str, Any] = {
        "model": {"new": MODELS[model]},
        "tokenizer": {"train": {"vocab_size": 1024}},
        "data": {"train": str(text), "seq_len": 256},
        "batch": {"micro": 2},
        "schedule": {"steps": steps},
        "save": {"keep": 1},
        "log": {"every": 1, "report": False},
        "run": {"output": str(output), "ranks": 2, "device": "cpu"},
    }
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    if "lora" in sections:
        tree["model"] = {"path": str(_base_model(model, text, folder) / "checkpoints")}
        del tree["tokenizer"]
    return _written({"case": name, "model": model, "command": command}, command, tree, folder / f"{name}.yaml")


def _drawn(name: str, text: Path, folder: Path, steps: int) -> _Run:
    """A drawn run: no evaluation, and a last save without a resume state, which takes longer than the steps."""
    seed, number = map(int, name.split("/"))
    command, drawn = draw_run(seed, number)
    file = folder / f"{seed}-{number}.yaml"
    tree = {
        **drawn,
        "tokenizer": {"train": {"vocab_size": 1024}},
        "data": {**drawn["data"], "train": str(text), "eval_fraction": 0},
        "schedule": {"steps": steps},
        "save": {"resume_state": False},
        "log": {"every": 1, "report": False},
        "run": {**drawn["run"], "output": str(file.with_suffix("")), "device": "cpu"},
    }
    facts = {"case": name, "model": drawn["model"]["new"]["model_type"], "command": command, "drawn": drawn}
    return _written(facts, command, tree, file)


def _written(facts: Mapping[str, Any], command: str, tree: Mapping[str, Any], file: Path) -> _Run:
    file.write_text(yaml.safe_dump(dict(tree)), encoding="utf-8")
    return _Run(facts, command, file, Path(tree["run"]["output"]))


def _base_model(model: str, text: Path, folder: Path) -> Path:
    """A run whose checkpoint adapters are put beside."""
    output = folder / "base"
    if not output.exists():
        tree = {
            "model": {"new": MODELS[model]},
            "tokenizer": {"train": {"vocab_size": 1024}},
            "data": {"train": str(text), "seq_len": 256},
            "batch": {"micro": 1},
            "schedule": {"steps": 1},
            "save": {"resume_state": False},
            "log": {"report": False},
            "run": {"output": str(output), "device": "cpu"},
        }
        config = folder / "base.yaml"
        config.write_text(yaml.safe_dump(tree), encoding="utf-8")
        _command("tune", config).check_returncode()
    return output


def _command(command: str, config: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "finetune", command, str(config), *more]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


def _line(row: Mapping[str, Any]) -> str:
    """For the terminal."""
    if "failed" in row:
        return f"{row['case']:22} failed: {str(row['failed']).splitlines()[-1] if row['failed'] else ''}"
    if "expected_seconds" in row:
        figures = f"expected {row['expected_seconds']:7.3f} s  measured {row['measured_seconds']:7.3f} s"
        more = f"cores of others {' and '.join(map(str, row['others_cores']))}"
    else:
        figures = f"forecast {row['forecast_bytes'] / 2**20:7,.0f} MiB  measured {row['measured_bytes'] / 2**20:7,.0f} MiB"
        more = row["phase"]
    return f"{row['case']:22} {figures}  {row['difference']:+.1%}  ({row['model']}, {more})"


def _record(row: dict[str, Any], *, timed: bool) -> None:
    """Put one case's row into the file of today; drawn runs have a file of their own."""
    drawn = "-random" if "drawn" in row else ""
    path = RESULTS / f"{'pace' if timed else 'forecast'}{drawn}-cpu-{datetime.datetime.now(datetime.UTC).date()}.json"
    before = json.loads(path.read_text()) if path.is_file() else {"rows": []}
    rows = [*(other for other in before["rows"] if other["case"] != row["case"]), row]
    names = list(TIMED if timed else CASES)
    rows.sort(key=lambda row: tuple(map(int, row["case"].split("/"))) if drawn else names.index(row["case"]))
    bar = TIME_BAR if timed else BAR
    facts = {
        **before,
        "what": _WHAT[timed],
        "hardware": f"{inventory.cpu_description()}, {inventory.usable_cores()} cores, "
        f"{inventory.memory_bytes() / 2**30:.0f} GiB",
        "versions": {name: inventory.version_of(name) for name in ("torch", "deepspeed", "transformers")},
        "bar": bar,
        "within_bar": f"{sum(abs(row.get('difference', 2 * bar)) <= bar for row in rows)} of {len(rows)}",
        "rows": rows,
    }
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
