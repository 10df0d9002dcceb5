"""``tessera-finetune doctor``: what this machine has, what is missing, and what each missing thing costs."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from finetune.commands.parser import CommandParser
from finetune.commands.tables import table_console
from finetune.machine import inventory, ops

State = Literal["ok", "note", "missing"]
_GIB = 1 << 30
_PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "safetensors", "tensorboard", "matplotlib")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: State
    """``missing`` is essential and makes the exit code 1; ``note`` costs something but does not stop training."""
    value: str
    remedy: str = ""


def add_arguments(parser: CommandParser) -> None:
    """What the command takes."""
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    findings = examine()
    if options.json:
        sys.stdout.write(json.dumps(as_json(findings), indent=2) + "\n")
    else:
        show(findings, table_console())
    return exit_code(findings)


def examine() -> list[Finding]:
    """Look at everything training depends on; takes well under a second, imports nothing heavy."""
    return [*_versions(), *_building(), *_memory(), *_devices()]


def exit_code(findings: list[Finding]) -> int:
    """0 unless something essential is missing."""
    return int(any(finding.state == "missing" for finding in findings))


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """For ``--json``: the findings by name, and whether training can run."""
    return {"ok": exit_code(findings) == 0, "findings": {f.name: asdict(f) for f in findings}}


def show(findings: list[Finding], console: Console) -> None:
    """Print the findings as a table: how each is, what was found, and what mends it."""
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("", "what", "found", "remedy"):
        table.add_column(heading, overflow="fold")
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "missing": "[red]missing[/]"}
    for finding in findings:
        table.add_row(marks[finding.state], finding.name, finding.value, finding.remedy)
    console.print(table)


def _versions() -> list[Finding]:
    findings = [Finding(name="python", state="ok", value=platform.python_version())]
    for package in _PACKAGES:
        version = inventory.version_of(package)
        state: State = "ok" if version else "missing"
        findings.append(
            Finding(name=package, state=state, value=version or "-", remedy="" if version else f"pip install {package}")
        )
    return findings


def _building() -> list[Finding]:
    built = ops.library_of(ops.CPU_ADAM)
    cost = "without it an offloaded optimizer is torch's AdamW, which is slower"
    pages = "and training on a CPU is slower"
    tools = (
        ("c++ compiler", inventory.compiler(), f"apt-get install g++ ({cost}, {pages})"),
        ("ninja", inventory.ninja(), f"pip install ninja ({cost})"),
        ("Python.h", inventory.python_headers(), f"apt-get install python3-dev ({cost})"),
        ("libaio", inventory.libaio(), "apt-get install libaio-dev (needed for NVMe offload only)"),
    )
    findings = [
        Finding(name=name, state="ok" if found else "note", value=found or "-", remedy="" if found else remedy)
        for name, found, remedy in tools
    ]
    when = "built" if built.is_file() else "not built yet; the first run that offloads the optimizer builds it"
    findings.append(Finding(name="CPU Adam", state="ok", value=f"{when} ({built.parent})"))
    return findings


def _memory() -> list[Finding]:
    limit = inventory.cgroup_memory_limit()
    memlock = inventory.memlock_bytes()
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    small_shm = shm is None or shm.total < 128 << 20
    return [
        Finding(name="cores", state="ok", value=f"{inventory.usable_cores()} usable; {inventory.cpu_description()}"),
        Finding(name="memory", state="ok", value=f"{inventory.memory_bytes() / _GIB:.1f} GiB"),
        Finding(name="cgroup memory limit", state="ok", value="none" if limit is None else f"{limit / _GIB:.1f} GiB"),
        Finding(
            name="memlock limit",
            state="ok",  # the buffers of NVMe offload are locked as far as it goes
            value="unlimited" if memlock is None else f"{memlock / _GIB:.3f} GiB",
        ),
        Finding(
            name="/dev/shm",
            state="note" if small_shm else "ok",
            value="-" if shm is None else f"{shm.free / _GIB:.2f} of {shm.total / _GIB:.2f} GiB free",
            remedy="docker run --shm-size 1g (NCCL and serving exchange data there)" if small_shm else "",
        ),
    ]


def _devices() -> list[Finding]:
    found = inventory.gpus()
    if not found:
        return [Finding(name="GPUs", state="ok", value="none; training runs on the CPU")]
    return [
        Finding(
            name=f"GPU {number}",
            state="ok",
            value=name if size is None else f"{name}, {size / _GIB:.1f} GiB",
        )
        for number, (name, size) in enumerate(found)
    ]
