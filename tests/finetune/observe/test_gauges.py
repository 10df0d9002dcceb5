"""Figures beside the steps, and what the launcher keeps and says of a run from outside, with made-up readings."""

from __future__ import annotations

import io
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from finetune.config import DataConfig, LogConfig, ModelConfig, RunConfig, TuneConfig
from finetune.engines.protocol import StepOutcome
from finetune.errors import RankDied, RunError
from finetune.forecast.pace import FILE as PACE
from finetune.forecast.pace import kept_pace
from finetune.machine.memory import Pages
from finetune.observe import gauges as measuring
from finetune.observe import outside
from finetune.observe import progress as showing
from finetune.observe.gauges import Gauges
from finetune.observe.outside import observed
from finetune.observe.progress import RunProgress, skip_in_words
from finetune.observe.spikes import Spike
from finetune.output.records import FORECAST, MEASURED, read_json, write_json

GIB = 1 << 30
CPU = torch.device("cpu")


def tune(output: Path, **log: Any) -> TuneConfig:
    return TuneConfig(
        run=RunConfig(output=str(output)),
        data=DataConfig(train=("x",)),
        model=ModelConfig(path="base"),
        log=LogConfig(**{"tensorboard": False, "report": False, **log}),
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=300, color_system=None)


# -- gauges


def test_figures_are_those_that_can_be_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "pages_of", lambda: Pages(own=3 * GIB, peak=4 * GIB, files=GIB))
    monkeypatch.setattr(measuring, "peak_flops", lambda device, ranks, dtype: 1e6 * ranks)
    plain = Gauges(tune(tmp_path), CPU, ranks=2, step_tokens=64)
    assert plain.read(0.5) == {"all_tokens_per_second": 32.0, "memory_bytes": 3 * GIB}, "no share without a forecast"
    write_json(tmp_path / FORECAST, {"flops_per_token": 1000.0})
    known = Gauges(tune(tmp_path), CPU, ranks=2, step_tokens=64)
    assert known.read(0.5)["mfu"] == pytest.approx(0.5 * 64 * 1000 / 2e6)
    monkeypatch.setattr(measuring, "peak_flops", lambda device, ranks, dtype: None)
    monkeypatch.setattr(measuring, "pages_of", lambda: None)
    assert Gauges(tune(tmp_path), CPU, ranks=2, step_tokens=64).read(2.0) == {"all_tokens_per_second": 128.0}


@pytest.mark.parametrize(
    ("durations", "kept"), [([9.0, 1.0, 1.0], None), ([9.0, 1.0, 2.0, 5.0], 2.0), ([9.0] + [0.5] * 9, 0.5)]
)
def test_the_pace_that_is_kept_is_the_middle_of_the_steps_after_the_first(
    tmp_path: Path, durations: list[float], kept: float | None
) -> None:
    config = tune(tmp_path)
    Gauges(config, CPU, ranks=1, step_tokens=64).keep(config, durations)
    pace = kept_pace(config)
    assert (pace and pace.step_seconds) == kept
    assert (pace and pace.tokens_per_second) == (kept and 64 / kept)


def test_a_disk_that_is_full_at_the_end_is_not_told_twice(tmp_path: Path) -> None:
    (tmp_path / PACE).mkdir()
    config = tune(tmp_path)
    Gauges(config, CPU, ranks=1, step_tokens=64).keep(config, [1.0] * 9)


# -- progress


def outcome(loss: float, skipped: str | None = None, diagnosis: str | None = None) -> StepOutcome:
    return StepOutcome(loss, 0.5, 16, skipped, False, diagnosis)


class Clock:
    """Two seconds pass between any two looks."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 2.0
        return self.now


def recorded(console: Console, config: TuneConfig, monkeypatch: pytest.MonkeyPatch, *, done: int = 0) -> RunProgress:
    monkeypatch.setattr(showing, "time", Clock())
    return RunProgress(console, config, Gauges(config, CPU, ranks=1, step_tokens=64), steps=8, done=done)


def entries(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def test_a_line_is_the_mean_of_its_good_steps_and_the_last_one_is_always_told(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded(console, tune(tmp_path, every=3), monkeypatch) as progress:
        for step, loss in enumerate((1.0, 2.0, 6.0, 4.0, None, 8.0, 7.0, 5.0), 1):
            progress.step(step, outcome(0.0, "gradient") if loss is None else outcome(loss), 1e-3, 16 * step)
    lines = entries(tmp_path)
    assert [(line["step"], line["loss"]) for line in lines if "loss" in line] == [(3, 3.0), (6, 6.0), (8, 6.0)]
    assert [line["tokens"] for line in lines if "loss" in line] == [48, 96, 128]
    assert [(line["step"], line["skipped"]) for line in lines if "skipped" in line] == [(5, "gradient")]
    assert all(line["all_tokens_per_second"] == 64 / line["step_seconds"] for line in lines if "loss" in line)
    assert lines[-1]["seconds_left"] == 0
    assert "step 5: the gradient is not a finite number; skipped on all ranks" in written(console)
    assert re.search(r"step 3/8  loss 3\.0000  lr 1\.00e-03  norm 0\.5  .* left", written(console))


def test_an_interval_without_a_good_step_has_no_loss(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded(console, tune(tmp_path, every=2), monkeypatch) as progress:
        progress.step(1, outcome(0.0, "scale"), 1e-3, 0)
        progress.step(2, outcome(0.0, "loss", "block 3 of the model"), 1e-3, 0)
    assert [sorted(line) for line in entries(tmp_path)] == [
        ["seconds_since_start", "skipped", "step"],
        ["diagnosis", "seconds_since_start", "skipped", "step"],
    ]


def test_evaluations_saves_and_spikes_are_told_and_take_no_time_of_a_step(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 4}\n{"step": 5}\n{"step": 6, "lo')
    with recorded(console, tune(tmp_path, every=1), monkeypatch, done=4) as progress:
        progress.step(5, outcome(1.0), 1e-3, 80)
        progress.evaluation(5, 2.5)
        progress.saved(5, Path("runs/[x]"), 1.25)
        progress.spike(Spike(first_step=4, step=5, loss=9.0, usual=1.5), None)
        progress.step(6, outcome(1.0), 1e-3, 96)
    lines = entries(tmp_path)
    assert [line["step"] for line in lines] == [4, 5, 5, 5, 5, 6], "steps that are taken again are told once"
    assert lines[2]["eval_loss"] == 2.5
    assert (lines[3]["saved"], lines[3]["seconds"]) == ("runs/[x]", 1.25)
    assert (lines[4]["spike"], lines[4]["since"], lines[4]["usual"]) == (9.0, 4, 1.5)
    said = written(console)
    for words in ("step 5/8  evaluation loss 2.5000", "step 5/8  saved runs/[x] in 1.2 s", "; none was saved before it"):
        assert words in said
    first, last = lines[1], lines[5]
    assert last["step_seconds"] < last["seconds_since_start"] - first["seconds_since_start"]


@pytest.mark.parametrize(
    ("skipped", "diagnosis", "said"),
    [
        ("loss", None, "the loss is not a finite number"),
        ("gradient", "layer 3", "the gradient is not a finite number; it began with layer 3"),
        ("scale", "x", "a gradient overflowed fp16, so the loss is scaled by half as much from now on; it began with x"),
    ],
)
def test_a_skipped_step_says_why(skipped: str, diagnosis: str | None, said: str) -> None:
    assert skip_in_words(outcome(0.0, skipped, diagnosis)) == said


# -- outside


class Watch:
    """What the ranks are said to have held."""

    peaks, peak_bytes = [2 * GIB, GIB], 3 * GIB

    def __init__(self, processes: list[int]) -> None:
        assert processes == [11, 12]

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder with a forecast, some saved bytes and a device's record."""
    monkeypatch.setattr(outside, "MemoryWatch", Watch)
    write_json(tmp_path / FORECAST, {"host_bytes": 6 * GIB, "hardware": {"ram_bytes": 8 * GIB}})
    for name, size in (
        ("checkpoints/step-1/a", 5),
        ("resume/step-1/b", 7),
        ("data/c", 11),
        ("snapshots/d", 100),
        ("log", 1000),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "logs").mkdir()
    write_json(tmp_path / "logs" / "device.json", {"peak_bytes": 17, "reserved_bytes": 13})
    return tmp_path


def test_what_was_seen_is_kept_and_said_beside_the_forecast(run: Path, console: Console) -> None:
    with observed(tune(run), [11, 12], console):
        pass
    seen = read_json(run / MEASURED)
    assert seen == {
        "host_bytes": 3 * GIB, "rank_bytes": [2 * GIB, GIB], "disk_bytes": 23, "device_bytes": 17, "device_reserved_bytes": 13,
    }  # fmt: skip
    assert written(console).startswith("peaks: host memory 3.00 GiB (forecast 6.00, +100 %)")


@pytest.mark.parametrize(
    ("told", "more"), [(False, "; the ranks had held 3.00 GiB, the forecast was 6.00 of 8.00 GiB"), (True, "")]
)
def test_a_rank_that_died_is_told_with_the_memory_unless_it_told_its_own_cause(
    run: Path, console: Console, told: bool, more: str
) -> None:
    error = RankDied("rank 1 was killed")
    error.told = told
    with pytest.raises(RankDied) as died, observed(tune(run), [11, 12], console):
        raise error
    assert died.value is error
    assert str(error) == f"rank 1 was killed{more}"
    assert read_json(run / MEASURED) is not None
    assert written(console) == "", "a run that failed says its cause, and no peaks"
    (run / FORECAST).unlink()
    plain = RankDied("rank 0 was killed")
    with pytest.raises(RankDied, match=r"^rank 0 was killed$"), observed(tune(run), [11, 12], console):
        raise plain


@pytest.mark.parametrize(
    ("failure", "reported"), [(None, [None]), (RunError("stopped"), ["stopped"]), (KeyboardInterrupt(), [])], ids=str
)
def test_a_report_is_written_however_a_run_ends_but_not_for_who_is_in_a_hurry(
    run: Path, console: Console, failure: BaseException | None, reported: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str | None] = []
    monkeypatch.setattr(
        "finetune.observe.report.write_report", lambda config, failure: told.append(failure) or run / "[r].html"
    )
    with suppress(RunError, KeyboardInterrupt), observed(tune(run, report=True), [11, 12], console):
        if failure is not None:
            raise failure
    assert told == reported
    assert ("report:     " in written(console)) is bool(reported)
    told.clear()
    with observed(tune(run), [11, 12], console):
        pass
    assert told == [], "none was asked for"


def test_a_report_that_fails_undoes_no_run(run: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(config: TuneConfig, failure: str | None) -> None:
        raise ValueError("no [font]")

    monkeypatch.setattr("finetune.observe.report.write_report", fails)
    with observed(tune(run, report=True), [11, 12], console):
        pass
    assert "no report: ValueError: no [font]" in written(console)
