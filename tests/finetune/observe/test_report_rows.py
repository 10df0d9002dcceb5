"""The tables of a run's report, row by row: what is told of it, and what is left out where nothing is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.config import DataConfig, LogConfig, ModelConfig, RunConfig, TuneConfig
from finetune.errors import ConfigError
from finetune.observe.report import _events, _forecast, _result, _samples
from finetune.output.records import FORECAST, MEASURED

GIB = 1 << 30


def step(number: int, loss: float, **more: Any) -> dict[str, Any]:
    return {"step": number, "loss": loss, "tokens": 1000 * number, **more}


def test_a_result_has_the_last_loss_the_best_evaluation_and_the_middle_speed() -> None:
    speeds = [(90.0, 30.0), (100.0, 50.0), (10.0, 1.0)]
    entries = [
        step(number, 5.0 - number, all_tokens_per_second=tokens, tokens_per_second=targets, mfu=targets / 100)
        for number, (tokens, targets) in enumerate(speeds, 1)
    ]
    evaluated = [{"step": 1, "eval_loss": 3.0}, {"step": 2, "eval_loss": 2.25}, {"step": 3, "eval_loss": 2.5}]
    skipped = [{"step": 1, "skipped": "loss"}, {"step": 2, "skipped": "scale"}]
    assert dict(_result([*entries, *evaluated, *skipped])) == {
        "steps": "3",
        "training loss": "2.0000",
        "evaluation loss": "2.5000",
        "best evaluation loss": "2.2500 at step 2",
        "target tokens": "3,000",
        "tokens/s, median": "90",
        "targets/s, median": "30",
        "MFU, median": "30.0%",
        "skipped steps": "2",
    }
    assert [name for name, _ in _result([step(12345, 1.0)])] == ["steps", "training loss", "target tokens"]
    assert _result([step(12345, 1.0)])[0] == ("steps", "12,345")


def test_events_are_told_in_the_order_of_the_log_and_ordinary_steps_are_none() -> None:
    entries = [
        step(1, 1.0),
        {"step": 2, "skipped": "scale"},
        {"step": 3, "skipped": "gradient", "diagnosis": "block 4"},
        {"step": 1000, "saved": "runs/x/step-1", "seconds": 1.26},
        {"step": 1001, "spike": 9.0, "since": 999, "usual": 2.5},
        {"step": 1001, "eval_loss": 2.0},
    ]
    assert _events(entries) == [
        ("2", "skipped", "the scaled gradient was not finite"),
        ("3", "skipped", "the gradient was not finite: block 4"),
        ("1,000", "saved", "runs/x/step-1, 1.3 s"),
        ("1,001", "loss spike", "9.0000 since step 999, usually 2.5000"),
    ]


def test_a_forecast_stands_beside_what_was_seen_and_what_there_is(tmp_path: Path) -> None:
    assert _forecast(tmp_path) == ([], [])
    hardware = {"ram_bytes": 64 * GIB, "gpu_bytes": None, "disk_bytes": 500 * GIB}
    items = {"weights": GIB, "activations": 2 * GIB}
    said = {"host_bytes": 3 * GIB, "device_bytes": 0, "disk_bytes": 5 * GIB, "hardware": hardware, "host_items": items}
    (tmp_path / FORECAST).write_text(json.dumps(said))
    rows, shown = _forecast(tmp_path)
    assert rows == [
        ("host memory, all ranks", "3.00 GiB", "–", "64.0 GiB"),
        ("disk", "5.00 GiB", "–", "500 GiB"),
    ]
    assert shown == [("activations", "2.00 GiB"), ("weights", "1.00 GiB")], "the largest first"
    (tmp_path / MEASURED).write_text(json.dumps({"host_bytes": 2 * GIB, "device_bytes": GIB}))
    rows, _ = _forecast(tmp_path)
    assert rows[0][2] == "2.00 GiB"
    assert rows[1] == ("device memory, one rank", "–", "1.00 GiB", "–"), "what was seen is told, forecast or not"


def test_samples_are_shown_where_they_are_asked_for_and_there_is_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(*prompts: str) -> TuneConfig:
        return TuneConfig(
            run=RunConfig(output=str(tmp_path)),
            data=DataConfig(train=("x",)),
            model=ModelConfig(path="base"),
            log=LogConfig(sample_prompts=prompts),
        )

    class Completer:
        folder = tmp_path / "checkpoints" / "step-00000002"

        def __init__(self, path: Path) -> None:
            if failing:
                raise ConfigError("the tokenizer is gone")

        def complete(self, prompts: list[Any], sampling: Any) -> list[str]:
            return [prompt.text.upper() for prompt in prompts]

    failing = False
    monkeypatch.setattr("finetune.trained.generate.Completer", Completer)
    assert _samples(config("a"), tmp_path) is None, "there is no checkpoint"
    Completer.folder.mkdir(parents=True)
    assert _samples(config(), tmp_path) is None, "none were asked for"
    found = _samples(config("a", "b"), tmp_path)
    assert found is not None
    assert found.heading == "step-00000002, likeliest tokens"
    assert list(found.texts) == [("a", "A"), ("b", "B")]
    failing = True
    found = _samples(config("a"), tmp_path)
    assert found is not None
    assert (found.heading, found.texts) == ("no samples: the tokenizer is gone", ())
