"""One small trained run for all tests that look at what training leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.finetune.support import run_command, small_run, write_config, write_text_folder


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A finished run of two ranks with ZeRO-3, everything offloaded."""

    config: Path
    output: Path
    text: Path
    stdout: str


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_folder(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> TrainedRun:
    folder = tmp_path_factory.mktemp("trained")
    tree = small_run(text_folder, folder / "run", offload={"optimizer": "cpu", "parameters": "cpu"})
    tree["run"]["ranks"] = 2
    config = write_config(tree, folder / "run.yaml")
    done = run_command("tune", config)
    assert done.returncode == 0, done.stderr
    return TrainedRun(config, folder / "run", text_folder, done.stdout)
