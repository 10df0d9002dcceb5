"""What an earlier release wrote still opens and scores as it did then (see ``tests/fixtures/release_0_1``)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from checkpoint import open_checkpoint
from finetune.config.load import load_config
from finetune.trained.evaluate import evaluate
from tests.finetune.support import COMMAND, ROOT
from tests.finetune.train.test_tune import losses_of

WRITTEN = ROOT / "tests" / "fixtures" / "release_0_1"

LOSSES = {"tune": 5.3672, "lora": 5.3598, "pretrain": 5.3345}
"""Of the saved step upon the two files of text, as the release that wrote it printed them."""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the runs, in which their relative paths hold."""
    copy = tmp_path / "written"
    shutil.copytree(WRITTEN, copy)
    monkeypatch.chdir(copy)
    return copy


@pytest.mark.parametrize("run", sorted(LOSSES))
def test_the_configuration_that_an_earlier_release_left_in_a_run_is_read(run: str) -> None:
    """It holds every key of that release, those that are gone by now among them."""
    config = load_config(WRITTEN / run / "config.yaml", command="pretrain" if run == "pretrain" else "tune")
    assert config.run.output == run
    assert config.activations.checkpoint == "none"


@pytest.mark.parametrize("root", ["tune/checkpoints", "tune/resume", "lora/resume", "pretrain/checkpoints", "pretrain/resume"])
def test_an_earlier_release_s_folders_are_whole(root: str) -> None:
    with open_checkpoint(WRITTEN / root, verify="sha256") as checkpoint:
        assert checkpoint.step == 3


@pytest.mark.parametrize("run", sorted(LOSSES))
def test_an_earlier_release_s_weights_score_as_they_did(run: str, written: Path) -> None:
    result = evaluate(written / run, [str(written / "text")], pattern="*.py", seq_len=16)
    assert result.loss == pytest.approx(LOSSES[run], abs=1e-4)


@pytest.mark.slow
def test_an_earlier_release_s_adapters_go_on_upon_their_base_and_data(written: Path) -> None:
    logged = losses_of(written / "lora")
    search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [*COMMAND, "tune", "lora.yaml", "--resume"]
    env = {**os.environ, "PYTHONPATH": search}
    done = subprocess.run(words, cwd=written, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "resumed at step 3" in done.stdout
    assert "do not say what their base held" in done.stdout
    assert losses_of(written / "lora") == pytest.approx(logged, rel=1e-4)
