"""What a run shows of each step, in a terminal and elsewhere."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from finetune.config import DataConfig, LogConfig, ModelConfig, RunConfig, TuneConfig
from finetune.engines.protocol import StepOutcome
from finetune.observe.gauges import Gauges
from finetune.observe.progress import RunProgress


def shown(tmp_path: Path, *, terminal: bool, width: int = 200) -> str:
    """What two steps look like, of 64 tokens each, of which 16 are targets."""
    config = TuneConfig(
        run=RunConfig(output=str(tmp_path)),
        data=DataConfig(train=("unused",)),
        model=ModelConfig(path="unused"),
        log=LogConfig(every=1, tensorboard=False),
    )
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)
    gauges = Gauges(config, torch.device("cpu"), ranks=1, step_tokens=64)
    with RunProgress(console, config, gauges, steps=2, done=0) as progress:
        for step in (1, 2):
            progress.step(step, StepOutcome(2.5, 0.731, 16, None, False), 1e-3, 16 * step)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True], ids=["lines", "terminal"])
def test_all_tokens_and_targets_are_told_apart_beside_the_gradient(tmp_path: Path, terminal: bool) -> None:
    text = shown(tmp_path, terminal=terminal)
    assert "norm 0.73" in text
    assert " tokens/s (" in text
    assert " targets)" in text
    entry = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert entry["all_tokens_per_second"] == pytest.approx(4 * entry["tokens_per_second"])


def test_a_narrow_terminal_keeps_what_counts_most(tmp_path: Path) -> None:
    text = shown(tmp_path, terminal=True, width=80)
    last = next(line for line in reversed(text.splitlines()) if "loss" in line)
    assert "loss 2.500 norm 0.73" in last, last
    assert " targets)" in last, last
