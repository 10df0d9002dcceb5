"""The training loop alone, with an engine that only answers: what is evaluated, saved and ended when."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finetune.config import DataConfig, EvalConfig, RunConfig, SaveConfig, SpikeConfig, TokenizerConfig, TuneConfig
from finetune.config.model import ModelConfig
from finetune.data.pack import Share
from finetune.engines.protocol import StepOutcome
from finetune.errors import LossSpike, NotFinite
from finetune.train.position import RunPosition
from finetune.train.schedule import Schedule
from finetune.train.trainer import Samples, Trainer


class Scripted:
    """Engine and saver in one: answers each step with the next loss (``None``: not finite) and notes what is asked."""

    rank, world_size, loss_scale, optimizer_steps = 1, 2, None, 0

    def __init__(self, losses: list[float | None]) -> None:
        self.losses, self.asked = list(losses), []

    def train_step(self, batches: Any, rate: float, *, stop: bool, diagnose: bool) -> StepOutcome:
        loss = self.losses.pop(0)
        self.asked.append("step")
        skipped = "loss" if loss is None else None
        return StepOutcome(loss or 0.0, 1.0, 8, skipped, stop, "layer 3" if skipped and diagnose else None)

    def save(self, engine: Any, position: RunPosition) -> Path:
        self.asked.append(f"save {position.step}")
        return Path(f"step-{position.step}")

    def snapshot(self, engine: Any, position: RunPosition) -> Path:
        self.asked.append(f"snapshot {position.step}")
        return Path(f"snapshot-{position.step}")


def trainer(script: Scripted, monkeypatch: pytest.MonkeyPatch, steps: int, **sections: Any) -> Trainer:
    monkeypatch.setattr("finetune.train.trainer.step_batches", lambda *_: [])
    monkeypatch.setattr(Trainer, "evaluate", lambda self: script.asked.append(f"evaluate {self.position.step}"))
    config = TuneConfig(
        run=RunConfig(output="x"), data=DataConfig(train=("x",)), model=ModelConfig(new={"model_type": "gpt2"}),
        tokenizer=TokenizerConfig(path="x"), **sections,
    )  # fmt: skip
    engine: Any = script
    nothing: Any = None
    samples = Samples(rows=nothing, held_out=nothing, order=nothing, share=Share(rank=1, ranks=2, micro=2, accumulation=1))
    schedule, console = Schedule(steps, 0, 1.0, 0.0), Console(file=io.StringIO())
    return Trainer(config, engine, samples, schedule, engine, RunPosition(), None, console)


def test_evaluations_come_before_saves_and_the_last_step_has_both(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted([1.0] * 5)
    trainer(script, monkeypatch, 5, eval=EvalConfig(every=2), save=SaveConfig(every=4, snapshot_every=3)).train(lambda: False)
    assert [asked for asked in script.asked if asked != "step"] == [
        "evaluate 2", "snapshot 3", "evaluate 4", "save 4", "evaluate 5", "save 5",
    ]  # fmt: skip


def test_who_stops_a_run_gets_a_save_and_no_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted([1.0] * 5)
    trainer(script, monkeypatch, 5, eval=EvalConfig(every=0), save=SaveConfig(every=0)).train(lambda: len(script.asked) >= 2)
    assert script.asked == ["step", "step", "step", "save 3"]


def test_a_good_step_between_forgives_and_three_bad_ones_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted([None, None, 1.0, None, None, None, 1.0])
    run = trainer(script, monkeypatch, 7, eval=EvalConfig(every=0), save=SaveConfig(every=0))
    with pytest.raises(NotFinite, match=r"3 steps in a row, last at step 6; it began with layer 3; .* none was saved yet"):
        run.train(lambda: False)


@pytest.mark.parametrize(("keep", "last"), [(1, "step"), (2, "save 7")])
def test_a_spike_ends_the_run_and_never_pushes_out_the_one_good_save(
    keep: int, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Scripted([1.0, 1.1, 1.0, 1.1, 1.0, 9.0, 9.0, 1.0])
    spike = SpikeConfig(action="stop", window=4, deviations=4.0, steps=2)
    run = trainer(script, monkeypatch, 8, eval=EvalConfig(every=0), save=SaveConfig(every=5, keep=keep), spike=spike)
    with pytest.raises(LossSpike, match=r"at steps 6 to 7.*last checkpoint before it: step-5"):
        run.train(lambda: False)
    assert script.asked[-1] == last
