"""The machine's speeds: measured on demand in processes like a run's ranks, and kept per machine in the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgspec

from finetune.config import TuneConfig
from finetune.errors import FinetuneError
from finetune.forecast.estimate import model_config_of
from finetune.forecast.facts import facts_of
from finetune.forecast.layout import layout_of
from finetune.forecast.seconds import trial_of
from finetune.forecast.speeds import Measured, prices_from, speeds_from
from finetune.forecast.trials import Job, prices_of, trials_of
from finetune.machine import inventory, ops
from finetune.machine.process import rank_environment
from finetune.output.records import read_json, write_json
from host.modules import import_path, module_command

_LIMIT_SECONDS: Final = 300
_PROGRAM: Final = "finetune.train.trial"
_METHOD: Final = 5
"""How operations are counted and speeds are measured; figures that were found in another way are not used."""


def machine_of(config: TuneConfig, precision: str, command: str) -> dict[str, Any]:
    """What the speeds of a run's ranks on a CPU depend on; figures of another machine or engine are not used."""
    offload = config.offload
    return {
        "method": _METHOD,
        "processor": inventory.cpu_description(),
        "cores": inventory.usable_cores(),
        "versions": {name: inventory.version_of(name) for name in ("torch", "deepspeed", "transformers")},
        "ranks": config.run.ranks,
        "threads": config.run.threads or max(1, inventory.usable_cores() // config.run.ranks),
        "precision": precision,
        "engine": [command, config.zero.stage, config.zero.bucket_elements, config.pipeline.stages],
        "update": [config.algorithm, offload.optimizer, offload.parameters, offload.ratio],
    }


def kept_speeds(config: TuneConfig, precision: str, command: str) -> Measured | None:
    """What was measured before of this machine for such ranks; ``None`` for nothing, or a file that is damaged."""
    here = machine_of(config, precision, command)
    try:
        found = read_json(_file_of(here))
        if found is None or found["machine"] != here:
            return None
        return Measured(speeds=speeds_from(found["speeds"]), prices=prices_from(found["prices"]))
    except (RuntimeError, KeyError, TypeError, ValueError, AttributeError):
        return None


def measure_speeds(config: TuneConfig, precision: str, command: str, *, libraries: Mapping[str, str] | None = None) -> Measured:
    """Measure, about half a minute, and keep the figures.

    Args:
        libraries: built ones that the run would load, by name.

    Raises:
        FinetuneError: the processes that measure failed.
    """
    here = machine_of(config, precision, command)
    job = Job(config=config, command=command, precision=precision, libraries=dict(libraries or {}))
    said = _measure(here, job)
    try:
        speeds = speeds_from(said["speeds"])
        trials, facts = [], {}
        for trial, seconds in zip(trials_of(config), said["seconds"], strict=True):
            shape = trial.data.seq_len, trial.batch.micro, str(trial.model.new)
            if shape not in facts:
                facts[shape] = facts_of(trial, model_config_of(trial), precision, on_gpu=False)
            layout = layout_of(trial, device="cpu", precision=precision, command=command)
            trials.append(trial_of(facts[shape], layout, speeds, float(seconds)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FinetuneError(f"the machine could not be measured: {error}") from error
    measured = Measured(speeds=speeds, prices=prices_of(trials))
    with suppress(OSError, RuntimeError):  # no cache folder: known to this process alone
        path = _file_of(here)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"machine": here, **asdict(measured)})
    return measured


def _file_of(here: Mapping[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()[:16]
    return ops.cache_folder() / "speeds" / f"{key}.json"


def _measure(here: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Let as many processes as the run has ranks measure at the same time; rank 0 tells."""
    ranks = here["ranks"]
    environment = {**os.environ, **rank_environment(ranks, here["threads"]), "PYTHONPATH": import_path(os.environ)}
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_bytes(msgspec.json.encode(job))
        try:
            for rank in range(ranks):
                own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                err = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                command = [*module_command(_PROGRAM), str(file)]
                processes.append(
                    subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True)
                )
            said, complaint = processes[0].communicate(timeout=_LIMIT_SECONDS)
            if processes[0].returncode != 0:
                last = complaint.strip().splitlines()[-1:]
                raise FinetuneError(f"the machine could not be measured: {last[0] if last else processes[0].returncode}")
            answer = json.loads(said.strip().splitlines()[-1])
            if not isinstance(answer, dict):
                raise ValueError(f"rank 0 said {answer}")
            return answer
        except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError) as error:
            raise FinetuneError(f"the machine could not be measured: {error}") from error
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
