"""The machine's speeds: measured on demand in processes like a run's ranks, and kept per machine in the cache folder."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from finetune.config import TuneConfig
from finetune.errors import FinetuneError
from finetune.machine import inventory, ops
from finetune.machine.process import rank_environment
from finetune.output.records import read_json, write_json
from host.modules import import_path, module_command

_LIMIT_SECONDS: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Of one rank, while all ranks of the run do the same."""

    products: Mapping[int, float]
    """Size of a square product, forward and backward -> operations a second."""
    attention: float
    """Operations a second of the causal attention kernel."""
    plain_bytes: float
    """Bytes a second of additions and the like."""
    costly_bytes: float
    """Bytes a second of activation functions, norms and the like."""
    update_bytes: float
    """Bytes a second of an optimizer's update."""
    call_seconds: float
    """Of one operation on next to nothing."""
    reduce_bytes: float | None
    """Bytes of a tensor a second that all ranks add up; ``None`` with one rank."""
    gather_bytes: float | None
    """Bytes of a whole tensor a second that all ranks collect; ``None`` with one rank."""

    def lines(self) -> list[str]:
        """For the reader."""
        products = ", ".join(f"{rate / 1e9:,.1f} at {size}" for size, rate in self.products.items())
        lines = [
            f"products: {products} (10^9 operations a second of one rank, by size); attention: {self.attention / 1e9:,.1f}",
            f"memory: {self.plain_bytes / 1e9:,.1f} GB/s in plain operations, {self.costly_bytes / 1e9:,.1f} in activation "
            f"functions and norms, {self.update_bytes / 1e9:,.1f} in an optimizer's update",
            f"one call: {self.call_seconds * 1e6:,.1f} us",
        ]
        if self.reduce_bytes is not None and self.gather_bytes is not None:
            lines.append(
                f"between ranks: {self.reduce_bytes / 1e9:,.2f} GB/s added up, {self.gather_bytes / 1e9:,.2f} collected"
            )
        return lines


def machine_of(config: TuneConfig, precision: str) -> dict[str, Any]:
    """What the speeds of a run's ranks on a CPU depend on; figures of another machine are not used."""
    return {
        "processor": inventory.cpu_description(),
        "cores": inventory.usable_cores(),
        "torch": inventory.version_of("torch"),
        "ranks": config.run.ranks,
        "threads": config.run.threads or max(1, inventory.usable_cores() // config.run.ranks),
        "precision": precision,
    }


def kept_speeds(config: TuneConfig, precision: str) -> Speeds | None:
    """What was measured before of this machine for such ranks; ``None`` for nothing, or a file that is damaged."""
    here = machine_of(config, precision)
    try:
        found = read_json(_file_of(here))
        return None if found is None or found["machine"] != here else _speeds(found["speeds"])
    except (RuntimeError, KeyError, TypeError, ValueError, AttributeError):
        return None


def measure_speeds(config: TuneConfig, precision: str) -> Speeds:
    """Measure, about 10 s, and keep the figures.

    Raises:
        FinetuneError: the processes that measure failed.
    """
    here = machine_of(config, precision)
    speeds = _measure(here)
    with suppress(OSError, RuntimeError):  # no cache folder: known to this process alone
        path = _file_of(here)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"machine": here, "speeds": asdict(speeds)})
    return speeds


def _file_of(here: Mapping[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()[:16]
    return ops.cache_folder() / "speeds" / f"{key}.json"


def _speeds(values: Mapping[str, Any]) -> Speeds:
    """From a file or a process.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is none.
    """
    products = {int(size): _positive(rate) for size, rate in values["products"].items()}
    if not products:
        raise ValueError("no product was measured")
    rest = {}
    for name in (field.name for field in fields(Speeds) if field.name != "products"):
        given = values[name]
        between = name in ("reduce_bytes", "gather_bytes")
        rest[name] = None if between and given is None else _positive(given)
    return Speeds(products=dict(sorted(products.items())), **rest)  # type: ignore[arg-type]


def _positive(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{value} is no speed")
    return number


def _measure(here: Mapping[str, Any]) -> Speeds:
    """Let as many processes as the run has ranks measure at the same time; rank 0 tells."""
    ranks = here["ranks"]
    environment = {**os.environ, **rank_environment(ranks, here["threads"]), "PYTHONPATH": import_path(os.environ)}
    command = [*module_command("finetune.forecast.probe"), here["precision"]]
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(ranks):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            err = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            processes.append(subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True))
        said, complaint = processes[0].communicate(timeout=_LIMIT_SECONDS)
        if processes[0].returncode != 0:
            last = complaint.strip().splitlines()[-1:]
            raise FinetuneError(f"the machine could not be measured: {last[0] if last else processes[0].returncode}")
        return _speeds(json.loads(said.strip().splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise FinetuneError(f"the machine could not be measured: {error}") from error
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
