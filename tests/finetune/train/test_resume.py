"""Going on after a kill at any moment, and on other numbers of ranks."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import open_checkpoint
from finetune.output.folder import step_folders
from tests.finetune.support import fork_command, run_command, small_run, write_config
from tests.finetune.train.test_tune import BEGIN_SECONDS, losses_of

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("TESSERA_KILLS", "3"))
"""Kills of the test below; more of them when looking for trouble."""


def tree(text: Path, output: Path, **sections: Any) -> dict[str, Any]:
    made = small_run(text, output, schedule={"steps": 12, "warmup": 2}, save={"every": 4, "keep": 0}, **sections)
    made["model"]["new"]["hidden_dropout"] = 0.0  # dropout draws per rank
    made["batch"] = {"micro": 1, "total": 8}
    made["eval"] = {"every": 0}
    made["run"]["ranks"] = 2
    return made


@pytest.fixture(scope="module")
def uninterrupted(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Configuration and output of two ranks that were left in peace."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_config(tree(text_folder, folder / "run"), folder / "run.yaml")
    done = run_command("tune", config)
    assert done.returncode == 0, done.stderr
    return config, folder / "run"


def back_to(step: int, run: Path, copy: Path) -> Path:
    """A copy of a run as it was right after the save of ``step``."""
    shutil.copytree(run, copy)
    for root in ("checkpoints", "resume"):
        for number, folder in step_folders(copy / root):
            if number > step:
                shutil.rmtree(folder)
        (copy / root / "latest").write_text(f"step-{step:08d}\n")
    return copy


def test_a_run_goes_on_with_four_ranks_and_then_with_one(uninterrupted: tuple[Path, Path], tmp_path: Path) -> None:
    config, whole = uninterrupted
    expected = losses_of(whole)
    four = back_to(4, whole, tmp_path / "four")
    done = run_command("tune", config, "--resume", "--run.output", four, "--run.ranks", 4, "--zero.stage", 2)
    assert done.returncode == 0, done.stderr
    assert "resumed at step 4" in done.stdout
    one = back_to(8, four, tmp_path / "one")
    done = run_command("tune", config, "--resume", "--run.output", one, "--run.ranks", 1, "--zero.stage", 1)
    assert done.returncode == 0, done.stderr
    assert "resumed at step 8" in done.stdout
    found = losses_of(one)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert {step: loss for step, loss in found.items() if step <= 4} == {step: expected[step] for step in range(1, 5)}


def steps_logged(output: Path) -> int:
    log = output / "log.jsonl"
    return log.read_text().count('"loss"') if log.is_file() else 0


def test_killed_at_any_moment_it_ends_as_if_it_never_was(uninterrupted: tuple[Path, Path], tmp_path: Path) -> None:
    config, whole = uninterrupted
    output = tmp_path / "run"
    draw = random.Random(11)
    for _ in range(KILLS):
        words = ["tune", config, "--resume", "--run.output", output]
        process = fork_command(words)
        try:
            # By the log's length rather than by the clock, then some milliseconds more: any moment between two steps.
            wanted = steps_logged(output) + draw.randrange(7)
            deadline = time.monotonic() + BEGIN_SECONDS
            while process.poll() is None and steps_logged(output) < wanted:
                assert time.monotonic() < deadline, "training did not come so far"
                time.sleep(0.002)
            time.sleep(draw.random() * 0.05)
        finally:
            process.kill()
            process.communicate()
        if step_folders(output / "resume"):
            with open_checkpoint(output / "resume", verify="sha256"):
                pass  # whatever was under way, what counts is whole
    done = run_command("tune", config, "--resume", "--run.output", output)
    assert done.returncode == 0, f"after {KILLS} kills: {done.stderr}"
    assert losses_of(output) == losses_of(whole)
    for root in ("checkpoints", "resume"):
        with open_checkpoint(output / root) as ours, open_checkpoint(whole / root) as theirs:
            assert ours.step == theirs.step == 12
            assert [name for name in theirs.tensors if not torch.equal(ours.read(name), theirs.read(name))] == []


def test_sound_changes_are_told_and_a_checkpoint_that_is_missing_is_made_up_for(
    uninterrupted: tuple[Path, Path], tmp_path: Path
) -> None:
    config, whole = uninterrupted
    other = back_to(8, whole, tmp_path / "other")
    shutil.rmtree(other / "checkpoints")  # as if killed between the two saves, the first one
    changed = ["--batch.total", 4, "--optimizer.lr", 0.001, "--schedule.shape", "linear", "--optimizer.clip", 0.5]
    done = run_command("tune", config, "--resume", "--run.output", other, *changed, "--run.precision", "bf16", "--run.ranks", 1)
    assert done.returncode == 0, done.stderr
    told = [line.removeprefix("changed: ") for line in done.stdout.splitlines() if line.startswith("changed: ")]
    assert sorted(told) == [
        "batch.total 8 -> 4",
        "optimizer.clip 1.0 -> 0.5",
        "optimizer.lr 0.005 -> 0.001",
        "run.precision fp32 -> bf16",
        "run.ranks 2 -> 1",
        "samples of a step 8 -> 4",
        "schedule.shape cosine -> linear",
    ]
    found = losses_of(other)
    assert sorted(found) == list(range(1, 13))
    assert max(found[step] for step in range(9, 13)) < max(found[step] for step in range(1, 9))
    step = Path("checkpoints") / "step-00000008"
    assert f"written now, since it was missing: {other / step}" in done.stdout
    with open_checkpoint(other / step) as ours, open_checkpoint(whole / step) as theirs:
        expected = {name: theirs.read(name).bfloat16() for name in theirs.tensors}
        assert [name for name in expected if not torch.equal(ours.read(name), expected[name])] == []


def test_a_run_with_weights_alone_goes_on_from_them(uninterrupted: tuple[Path, Path], tmp_path: Path) -> None:
    config, whole = uninterrupted
    left = back_to(4, whole, tmp_path / "left")
    shutil.rmtree(left / "resume")
    done = run_command("tune", config, "--resume", "--run.output", left, "--schedule.steps", 6)
    assert done.returncode == 0, done.stderr
    assert f"resumed at step 4 from {left / 'checkpoints' / 'step-00000004'}" in done.stdout
    assert "lost: the optimizer's moments" in done.stdout
    assert "lost: what was not saved, steps 5 to 12; they are taken again" in done.stdout
    found, expected = losses_of(left), losses_of(whole)
    assert found[5] == pytest.approx(expected[5], rel=1e-5), "the weights and the place in the data are those of the save"
    assert sorted(found) == list(range(1, 7))
