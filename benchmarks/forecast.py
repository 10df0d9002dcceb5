"""Forecast against measurement: host memory of whole runs on the CPU, one for each kind of configuration.

``python -m benchmarks.forecast [NAME ...]`` trains a few steps with each and records both figures. What is measured is said in
``finetune.machine.memory``. ``--random 30 --seed N`` does it with runs whose shapes are drawn (``benchmarks.random_runs``):
models that the forecast was not made with. ``--time`` compares seconds a step instead, of smaller runs, each right after the
machine was measured for it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.random_runs import draw_run
from finetune.machine import inventory

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
BAR: Final = 0.10
"""Largest difference of forecast and measurement, as a share of what was measured."""

MODELS: Final[dict[str, dict[str, Any]]] = {
    "gpt_neox 46M": {
        "model_type": "gpt_neox", "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8,
        "intermediate_size": 2048, "vocab_size": 8192,
    },
    "llama 68M": {
        "model_type": "llama", "hidden_size": 640, "num_hidden_layers": 8, "num_attention_heads": 10, "num_key_value_heads": 5,
        "intermediate_size": 1792, "vocab_size": 16384,
    },
}  # fmt: skip
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

_SMALL_MODELS: Final[dict[str, dict[str, Any]]] = {
    "gpt2 6M": {"model_type": "gpt2", "n_embd": 256, "n_layer": 6, "n_head": 4, "vocab_size": 2048},
    "qwen2 8M": {
        "model_type": "qwen2", "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 704, "vocab_size": 4096,
    },
    "gpt_neox 7M": {
        "model_type": "gpt_neox", "hidden_size": 384, "num_hidden_layers": 3, "num_attention_heads": 6,
        "intermediate_size": 1536, "vocab_size": 2048,
    },
    "llama 3M": {
        "model_type": "llama", "hidden_size": 192, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 512, "vocab_size": 2048,
    },
}  # fmt: skip
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


def main() -> int:
    """Run the cases; 1 when one of them misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; none: all")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of each (5)")
    parser.add_argument("--random", type=int, metavar="N", help="instead, N runs drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn runs (0)")
    parser.add_argument("--first", type=int, default=0, help="number of the first drawn run (0)")
    parser.add_argument("--time", action="store_true", help="instead, seconds a step: measure the machine, run, compare")
    parser.add_argument("--no-record", action="store_true", help="write no result file")
    options = parser.parse_args()
    if options.random is not None and options.cases:
        parser.error("--random takes no names of cases")
    if options.random is not None and options.time:
        parser.error("--random and --time exclude each other")
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
            if options.time:
                print(_timed(name, text, folder, options.steps, record=not options.no_record), flush=True)
                continue
            row = _run_drawn(name, text, folder) if options.random is not None else _run(name, text, folder, options.steps)
            rows.append(row)
            print(_line(row), flush=True)
            if not options.no_record:
                _record(row)
    return int(any(abs(row.get("difference", 0.0)) > BAR for row in rows))


def _write_text(path: Path) -> Path:
    draw = random.Random(1)
    words = [f"{a}{b}" for a in ("re", "un", "in", "ex", "pro") for b in ("port", "tend", "form", "cede", "ject", "act")]
    path.write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(6000)), encoding="utf-8")
    return path


def _run(name: str, text: Path, folder: Path, steps: int) -> dict[str, Any]:
    command, model, _ = CASES[name]
    config, output = _write_run(name, CASES, text, folder, steps)
    done = _command(command, config)
    return _compared({"case": name, "model": model, "command": command}, done, output)


def _timed(name: str, text: Path, folder: Path, steps: int, *, record: bool) -> str:
    """Measure the machine and run a case right after it; a line for the terminal."""
    command, model, _ = TIMED[name]
    config, output = _write_run(name, TIMED, text, folder, steps)
    planned = _command("plan", config, "--measure", "--json", "--command", command)
    load = os.getloadavg()[0]
    done = _command(command, config)
    if planned.returncode != 0 or done.returncode != 0:
        return f"{name:22} failed: {(planned.stderr + done.stderr).strip()[-300:]}"
    expected = json.loads(planned.stdout)
    measured = json.loads((output / "pace.json").read_text())["step_seconds"]
    ratio = expected["pace"]["step_seconds"] / measured
    row = {"case": name, "model": model, "command": command, "expected_seconds": round(expected["pace"]["step_seconds"], 4)}
    row |= {"measured_seconds": round(measured, 4), "ratio": round(ratio, 3), "load": load, "speeds": expected["speeds"]}
    if record:
        _record_pace(row)
    return (
        f"{name:22} expected {row['expected_seconds']:7.3f} s  measured {measured:7.3f} s  ratio {ratio:.2f}  load {load:.1f}"
    )


def _write_run(
    name: str, cases: Mapping[str, tuple[str, str, dict[str, Any]]], text: Path, folder: Path, steps: int
) -> tuple[Path, Path]:
    """The file of a case, and its output folder."""
    _, model, sections = cases[name]
    output = folder / name
    tree: dict[str, Any] = {
        "model": {"new": {**MODELS, **_SMALL_MODELS}[model]},
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
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return config, output


def _run_drawn(name: str, text: Path, folder: Path) -> dict[str, Any]:
    """A drawn run: three steps, no evaluation, and a last save without a resume state, which takes longer than the steps."""
    seed, number = map(int, name.split("/"))
    command, drawn = draw_run(seed, number)
    output = folder / name.replace("/", "-")
    tree = {
        **drawn,
        "tokenizer": {"train": {"vocab_size": 1024}},
        "data": {**drawn["data"], "train": str(text), "eval_fraction": 0},
        "schedule": {"steps": 3},
        "save": {"resume_state": False},
        "log": {"every": 1, "report": False},
        "run": {**drawn["run"], "output": str(output), "device": "cpu"},
    }
    config = folder / f"{output.name}.yaml"
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    done = _command(command, config)
    row = _compared({"case": name, "model": drawn["model"]["new"]["model_type"], "command": command}, done, output)
    shutil.rmtree(output, ignore_errors=True)
    return {**row, "drawn": drawn}


def _compared(row: dict[str, Any], done: subprocess.CompletedProcess[str], output: Path) -> dict[str, Any]:
    """The row of a run that has ended: memory, and seconds a step where they were forecast."""
    if done.returncode != 0:
        return {**row, "failed": (done.stderr or done.stdout).strip()[-500:]}
    said, seen = (json.loads((output / file).read_text()) for file in ("forecast.json", "measured.json"))
    forecast, measured = said["host_bytes"], seen["host_bytes"]
    return {
        **row,
        "forecast_bytes": forecast,
        "measured_bytes": measured,
        "difference": round((forecast - measured) / measured, 4),
        "phase": said["need"]["host_phase"],
        "process_bytes": said["host_items"]["process"] // said["layout"]["ranks"],
    }


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
        return f"{row['case']:18} failed: {str(row['failed']).splitlines()[-1] if row['failed'] else ''}"
    figures = f"forecast {row['forecast_bytes'] / 2**20:7,.0f} MiB  measured {row['measured_bytes'] / 2**20:7,.0f} MiB"
    return f"{row['case']:18} {figures}  {row['difference']:+.1%}  ({row['model']}, {row['phase']})"


def _record(row: dict[str, Any]) -> None:
    """Put one case's row into the file of today."""
    today = datetime.datetime.now(datetime.UTC).date()
    path = RESULTS / f"forecast-cpu-{today}.json"
    before = json.loads(path.read_text())["rows"] if path.is_file() else []
    rows = [*(other for other in before if other["case"] != row["case"]), row]
    rows.sort(
        key=lambda row: (0, list(CASES).index(row["case"])) if row["case"] in CASES else (1, *map(int, row["case"].split("/")))
    )
    facts = {
        "what": "peak host memory of all ranks together, forecast before the run and measured (finetune/machine/memory.py)",
        "hardware": f"{inventory.cpu_description()}, {inventory.usable_cores()} cores, {inventory.memory_bytes() >> 30} GiB",
        "versions": {name: inventory.version_of(name) for name in ("torch", "deepspeed", "transformers")},
        "bar": BAR,
        "rows": rows,
    }
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _record_pace(row: dict[str, Any]) -> None:
    """Put one timed case's row into the file of today."""
    path = RESULTS / f"pace-cpu-{datetime.datetime.now(datetime.UTC).date()}.json"
    before = json.loads(path.read_text())["rows"] if path.is_file() else []
    facts = {
        "what": "seconds a step, expected from the speeds that plan --measure found right before a run, and the run's median; "
        "load is the machine's load average at the run's start: above the number of cores, others were running too",
        "hardware": f"{inventory.cpu_description()}, {inventory.usable_cores()} cores, {inventory.memory_bytes() >> 30} GiB",
        "versions": {name: inventory.version_of(name) for name in ("torch", "deepspeed", "transformers")},
        "rows": [*(other for other in before if other["case"] != row["case"]), row],
    }
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
