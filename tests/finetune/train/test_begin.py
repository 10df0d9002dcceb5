"""What a run says before its first step, when it ends before one, and which operations it has built; no engine is needed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from finetune.config import (
    DataConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    PipelineConfig,
    RunConfig,
    TuneConfig,
    ZeroConfig,
)
from finetune.errors import ConfigError
from finetune.launch.prerequisites import built_ops
from finetune.machine import ops, pages
from finetune.train import begin as beginning
from finetune.train.begin import Job, run_rank
from finetune.train.position import RunPosition
from tests.finetune.launch.test_instructions import PREPARED


def tune(output: Path | str = "x", **sections: Any) -> TuneConfig:
    run = RunConfig(output=str(output), **sections.pop("run", {}))
    return TuneConfig(**{"run": run, "data": DataConfig(train=("x",)), "model": ModelConfig(path="base"), **sections})


def job(config: TuneConfig, **changes: Any) -> Job:
    usual = {"config": config, "prepared": PREPARED, "device": torch.device("cpu"), "precision": "fp32", "cpu_adam": True}
    return Job(**{**usual, **changes})


def told(made: Job, *, frozen: bool = False, ranks: int = 1) -> list[str]:
    model = nn.Sequential(nn.Linear(10, 100, bias=False), nn.Linear(100, 20, bias=False))
    model[0].weight.requires_grad = not frozen
    initial, engine = (SimpleNamespace(name="runs/base"), SimpleNamespace(model=model, world_size=ranks))
    words: list[str] = beginning._model_in_words(made, initial, engine)  # type: ignore[arg-type]
    return words


def test_a_run_introduces_its_model_by_what_it_is_trained_by_and_on() -> None:
    plain = told(job(tune(zero=ZeroConfig(stage=2))))
    assert plain == [
        "runs/base, 3,000 parameters",
        "ZeRO-2",
        "1 rank on cpu, fp32",
        "64 tokens joined, 89% of them targets (tessera-finetune data show)",
    ]
    zenflow = OffloadConfig(optimizer="cpu", method="zenflow")
    adapters = told(job(tune(offload=zenflow), device=torch.device("cuda"), precision="bf16"), frozen=True, ranks=4)
    assert adapters[:3] == [
        "runs/base, 3,000 parameters, 2,000 trained",
        "ZeRO-3 with optimizer on cpu and zenflow",
        "4 ranks on cuda, bf16",
    ]
    both = OffloadConfig(optimizer="cpu", parameters="nvme", path="/disk")
    assert told(job(tune(offload=both)))[1] == "ZeRO-3 with optimizer on cpu and parameters on nvme"
    stages = tune(run={"ranks": 4}, pipeline=PipelineConfig(stages=4), zero=ZeroConfig(stage=1))
    assert told(job(stages, pipeline=True), ranks=4)[1:3] == ["4 pipeline stages", "ZeRO-1"]


def test_what_is_gone_on_from_is_told_with_what_is_lost_and_what_changed(tmp_path: Path) -> None:
    config = tune(tmp_path)
    assert beginning._resumed_in_words(config, None, RunPosition(), {}) == []
    state: Any = SimpleNamespace(
        path=tmp_path / "resume" / "step-00000004", lost=("the save in x: damaged",), course={"run.ranks": 2, "old": 1}
    )
    position = RunPosition(step=4)
    words = beginning._resumed_in_words(config, state, position, {"run.ranks": 4, "new": 1})
    assert words == [
        f"resumed at step 4 from {state.path}",
        "lost: the save in x: damaged",
        "changed: run.ranks 2 -> 4",
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"step": step}) + "\n" for step in (2, 4)))
    assert beginning._resumed_in_words(config, state, position, {}) == words[:2], "what is logged was saved"
    log.write_text(json.dumps({"step": 9}) + "\n")
    assert beginning._resumed_in_words(config, state, position, {})[2] == (
        "lost: what was not saved, steps 5 to 9; they are taken again"
    )


class Trainer:
    """In the place of a trainer: notes what is asked of it, and whether it was to stop."""

    def __init__(self, rank: int, *, finished: bool) -> None:
        self.finished, self.schedule = finished, SimpleNamespace(steps=12)
        self.engine = SimpleNamespace(rank=rank, close=lambda: self.asked.append("close"))
        self.asked: list[object] = []

    def train_shown(self, should_stop: Callable[[], bool]) -> None:
        self.asked.append(should_stop())


@pytest.mark.parametrize(
    ("minutes", "passed", "wanted", "stops"),
    [
        (None, 1e9, False, False),
        (None, 0.0, True, True),
        (2.0, 119.0, False, False),
        (2.0, 120.0, False, True),
        (2.0, 0.0, True, True),
    ],
)
def test_a_run_stops_when_it_is_asked_to_or_its_minutes_are_over(
    minutes: float | None, passed: float, wanted: bool, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, times = Trainer(0, finished=False), [1000.0] if minutes else []
    times.append(1000.0 + passed)
    monkeypatch.setattr(beginning, "begin", lambda *_: trainer)
    monkeypatch.setattr(beginning, "time", SimpleNamespace(monotonic=lambda: times.pop(0)))
    run_rank(job(tune(run={"max_minutes": minutes})), Console(file=io.StringIO()), lambda: wanted)
    assert trainer.asked == [stops, "close"], "the minutes count from before the model is built"


@pytest.mark.parametrize(("rank", "said"), [(0, "nothing to do: the schedule's 12 steps are done\n"), (1, "")])
def test_a_run_that_is_done_says_so_once_and_leaves_the_ranks(rank: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, out = Trainer(rank, finished=True), io.StringIO()
    monkeypatch.setattr(beginning, "begin", lambda *_: trainer)
    run_rank(job(tune()), Console(file=out, width=200), lambda: True)
    assert (trainer.asked, out.getvalue()) == (["close"], said)


@pytest.mark.parametrize(("rank", "missing"), [(0, True), (1, True), (0, False)])
def test_a_checkpoint_that_was_missing_is_told_of_by_rank_0(rank: int, missing: bool) -> None:
    written, out = Path("checkpoints/step-00000004"), io.StringIO()
    saver: Any = SimpleNamespace(save_missing=lambda engine, position: written if missing else None)
    state: Any = SimpleNamespace(path=Path("resume/step-00000004"), position=RunPosition(step=4))
    engine: Any = SimpleNamespace(rank=rank)
    found = beginning._made_up(saver, engine, state, Console(file=out, width=200))
    assert found == (written if missing else state.path)
    assert out.getvalue() == (f"written now, since it was missing: {written}\n" if missing and rank == 0 else "")


# -- operations that are built before


@pytest.mark.parametrize(
    ("sections", "asked"),
    [
        ({}, []),
        ({"offload": OffloadConfig(optimizer="cpu")}, [ops.CPU_ADAM]),
        ({"offload": OffloadConfig(optimizer="cpu"), "optimizer": OptimizerConfig(name="lion")}, []),
        ({"offload": OffloadConfig(optimizer="cpu", method="zenflow")}, []),
        ({"offload": OffloadConfig(parameters="nvme", path="/disk")}, [ops.PIN_MEMORY, ops.ASYNC_IO]),
        ({"offload": OffloadConfig(optimizer="nvme", path="/disk")}, [ops.PIN_MEMORY, ops.ASYNC_IO, ops.CPU_ADAM]),
        ({"run": {"device": "cpu"}}, [ops.PAGES]),
        ({"run": {"device": "auto"}}, [ops.PAGES]),
    ],
)
def test_only_operations_that_a_run_loads_are_built(
    sections: dict[str, Any], asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sections = {"run": {"device": "cuda"}, **sections}
    seen: list[str] = []
    monkeypatch.setattr(pages, "supported", lambda: True)
    monkeypatch.setattr(ops, "ensure", lambda op, _: seen.append(op) or ops.Built(True, ""))
    monkeypatch.setattr(ops, "library_of", lambda op: tmp_path / f"{op}.so")
    assert built_ops(tune(**sections), lambda _: None) == {op: str(tmp_path / f"{op}.so") for op in asked}
    assert seen == asked


def test_without_an_operation_a_run_goes_on_slower_or_is_refused_with_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "ensure", lambda op, _: ops.Built(False, f"no compiler for {op}"))
    monkeypatch.setattr(pages, "supported", lambda: True)
    said: list[str] = []
    assert built_ops(tune(offload=OffloadConfig(optimizer="cpu")), said.append) == {}
    assert said == [
        "no compiler for cpu_adam; training goes on with torch's AdamW on the CPU, which is slower and as exact",
        "no compiler for pages; every step on the CPU asks the system for memory anew, which makes it slower",
    ]
    monkeypatch.setattr(pages, "supported", lambda: False)
    assert built_ops(tune(), said.append) == {}
    assert len(said) == 2, "of what no compiler could mend nothing is said"
    with pytest.raises(ConfigError, match=r"^offload\.ratio: below 1 needs DeepSpeed's CPU Adam, but no compiler for cpu_adam"):
        built_ops(tune(offload=OffloadConfig(optimizer="cpu", ratio=0.5)), said.append)
    with pytest.raises(ConfigError, match=r"^offload: nvme needs it, but no compiler for pin_memory; or offload to cpu$"):
        built_ops(tune(offload=OffloadConfig(optimizer="nvme", path="/disk")), said.append)
