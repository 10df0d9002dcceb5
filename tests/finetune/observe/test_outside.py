"""Runs from end to end: forecast first, refused or measured, with report, metrics and samples."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import urllib.request
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from finetune.cli import main
from finetune.config import DataConfig, LogConfig, ModelConfig, RunConfig, TuneConfig
from finetune.errors import ConfigError, RankDied
from finetune.observe.outside import observed
from finetune.observe.plots import panels_of
from finetune.observe.sinks import Sinks
from finetune.output.records import FORECAST, MEASURED, read_json, write_json
from tests.finetune.conftest import TrainedRun
from tests.finetune.support import run_command, small_run, start_command, write_config


def test_a_run_says_its_forecast_first_and_its_peaks_last(trained: TrainedRun) -> None:
    lines = trained.stdout.splitlines()
    said = next(number for number, line in enumerate(lines) if line.startswith("forecast: needs"))
    assert said < next(number for number, line in enumerate(lines) if "12 steps of" in line)
    assert any(line.startswith("peaks: host memory") for line in lines[said:])
    forecast, measured = (read_json(trained.output / name) for name in (FORECAST, MEASURED))
    assert forecast is not None
    assert measured is not None
    assert len(measured["rank_bytes"]) == 2
    assert measured["disk_bytes"] <= forecast["disk_bytes"]
    log = [json.loads(line) for line in (trained.output / "log.jsonl").read_text().splitlines()]
    step = next(entry for entry in log if "loss" in entry)
    assert {"mfu", "memory_bytes", "seconds_left", "step_seconds"} <= set(step)
    assert 0 < step["mfu"] < 1
    assert "report.html" in trained.stdout
    page = (trained.output / "report.html").read_text()
    assert page.count("<svg") == 1
    assert all(panel.title in page for panel in panels_of(log) if panel.curves)


@pytest.mark.slow
def test_ranks_started_as_programs_hold_about_what_was_forecast(text_folder: Path, tmp_path: Path) -> None:
    tree = small_run(text_folder, tmp_path / "run", offload={"optimizer": "cpu", "parameters": "cpu"}, run={"ranks": 2})
    done = run_command("tune", write_config(tree, tmp_path / "run.yaml"), env={})  # forked ranks would share pages
    assert done.returncode == 0, done.stderr
    forecast, measured = (read_json(tmp_path / "run" / name) for name in (FORECAST, MEASURED))
    assert forecast is not None
    assert measured is not None
    # A run this small is mostly the pages of libraries, which vary with the installation; benchmarks/forecast.py has the bar.
    assert forecast["host_bytes"] == pytest.approx(measured["host_bytes"], rel=0.3)


def test_a_later_plan_knows_the_pace(trained: TrainedRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(trained.config), "--json"]) == 0
    pace = json.loads(capsys.readouterr().out)["pace"]
    assert pace["step_seconds"] > 0
    assert "earlier run" in pace["source"]


def test_what_cannot_fit_is_refused_before_anything_is_loaded(text_folder: Path, tmp_path: Path) -> None:
    tree = small_run(text_folder, tmp_path / "run")
    tree["batch"] = {"micro": 200_000_000}  # of a model that is small: its sizes alone say nothing
    done = run_command("tune", write_config(tree, tmp_path / "run.yaml"))
    assert done.returncode == 2, done.stderr
    assert "host memory: needs" in done.stderr
    assert "--anyway" in done.stderr
    assert "the ranks had held" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("told", [True, False], ids=["a broken rule", "a rank that was killed"])
def test_the_memory_of_the_ranks_is_said_where_it_may_be_the_cause(tmp_path: Path, told: bool) -> None:
    write_json(tmp_path / FORECAST, {"host_bytes": 1 << 30, "hardware": {"ram_bytes": 2 << 30}})
    error = RankDied("data.seq_len is 4096; it must be at most 512")
    error.told = told
    with pytest.raises(RankDied) as raised, observed(_logged(tmp_path), [os.getpid()], Console(file=io.StringIO())):
        raise error
    assert ("the ranks had held" in str(raised.value)) is not told


def test_a_loss_spike_stops_a_run_that_asks_for_it(text_folder: Path, tmp_path: Path) -> None:
    tree = small_run(text_folder, tmp_path / "run", schedule={"steps": 40, "warmup": 39}, save={"every": 4})
    # The learning rate climbs to where the loss cannot but rise.
    tree["optimizer"] = {"lr": 30.0, "clip": 0}
    tree["spike"] = {"action": "stop", "window": 4, "steps": 1, "deviations": 3.0}
    tree["log"] |= {"sample_prompts": ["def get_path("], "metrics_port": 0}
    done = run_command("tune", write_config(tree, tmp_path / "run.yaml"))
    assert done.returncode == 1, done.stderr
    assert "the loss rose to" in done.stderr
    assert "spike.action: stop" in done.stderr
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    (spike,) = [entry for entry in log if "spike" in entry]
    last = max(entry["step"] for entry in log if "saved" in entry)
    assert last == spike["step"], "the run saves where it stops"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "The run ended early" in page
    assert "def get_path(" in page


def test_metrics_answer_while_a_run_lasts(text_folder: Path, tmp_path: Path) -> None:
    tree = small_run(text_folder, tmp_path / "run", schedule={"steps": 1_000_000}, save={"every": 0})
    tree["log"] |= {"metrics_port": 0, "report": False}
    with start_command(["tune", write_config(tree, tmp_path / "run.yaml")]) as process:
        assert process.stdout is not None
        address = ""
        for line in process.stdout:
            if found := re.search(r"metrics: (http://127\.0\.0\.1:\d+/metrics)", line):
                address = found[1]
            if address and line.startswith("step "):
                break
        with urllib.request.urlopen(address, timeout=400) as answer:
            text = answer.read().decode()
        process.kill()
        process.communicate(timeout=600)
    assert float(re.search(r'^tessera_train_tokens_total\{model_name="run"\} (\S+)$', text, re.MULTILINE)[1]) > 0
    assert 'tessera_train_memory_bytes{model_name="run",where="host"}' in text, "under the name of the run's folder"


@pytest.mark.parametrize(
    ("key", "value", "says"), [("log.wandb", "mine", "pip install wandb"), ("log.metrics_port", "70000", "between 0 and 65535")]
)
def test_what_is_asked_for_and_missing_is_refused_at_once(
    trained: TrainedRun, key: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["tune", str(trained.config), f"--{key}", value, "--run.output", "never"]) == 2
    error = capsys.readouterr().err.replace("\n", " ")
    assert key in error
    assert says in error
    assert not Path("never").exists()


class _WeightsAndBiases(ModuleType):
    """Stands in for the package ``wandb``: what this project calls of it, and no more, so that nothing else is relied on."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[dict[str, Any]] = []
        self.refusal: Exception | None = None

    def init(self, *, project: str, id: str | None, resume: str, dir: str, name: str, config: dict[str, Any]) -> Any:
        if self.refusal is not None:
            raise self.refusal
        made: dict[str, Any] = {"project": project, "id": id or "made-here", "resume": resume, "config": config, "logged": []}
        self.runs.append(made)
        return SimpleNamespace(
            id=made["id"],
            log=lambda scalars, step: made["logged"].append((step, scalars)),
            finish=lambda: made.update(finished=True),
        )


@pytest.fixture
def weights_and_biases(monkeypatch: pytest.MonkeyPatch) -> _WeightsAndBiases:
    package = _WeightsAndBiases()
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def _logged(tmp_path: Path) -> TuneConfig:
    return TuneConfig(
        run=RunConfig(output=str(tmp_path)),
        data=DataConfig(train=("unused",)),
        model=ModelConfig(path="unused"),
        log=LogConfig(tensorboard=False, wandb="mine"),
    )


def test_figures_go_to_one_run_of_weights_and_biases_however_often_it_is_resumed(
    weights_and_biases: _WeightsAndBiases, tmp_path: Path
) -> None:
    for step in (1, 2):
        sinks = Sinks(_logged(tmp_path), done=step - 1)
        sinks.write(step, {"train/loss": 3.0 / step})
        sinks.close()
    first, second = weights_and_biases.runs
    assert (first["id"], second["id"]) == ("made-here", "made-here")
    assert (first["project"], first["resume"]) == ("mine", "allow")
    assert first["logged"] == [(1, {"train/loss": 3.0})]
    assert second["logged"] == [(2, {"train/loss": 1.5})]
    assert first["finished"]
    assert first["config"]["log"]["wandb"] == "mine"


def test_a_refusal_of_weights_and_biases_says_what_to_do(weights_and_biases: _WeightsAndBiases, tmp_path: Path) -> None:
    weights_and_biases.refusal = RuntimeError("No API key configured")
    with pytest.raises(ConfigError, match=r"log\.wandb is 'mine'.*No API key configured.*WANDB_MODE=offline"):
        Sinks(_logged(tmp_path), done=0)
    assert not (tmp_path / "wandb-run").exists()
