"""Processes of ours run our own modules, whatever lies in the folder they are started in, and their end is told."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from finetune.config import DataConfig, ModelConfig, RunConfig, TuneConfig
from finetune.errors import FinetuneError
from finetune.launch import local
from finetune.launch.instructions import RunFile
from finetune.launch.local import RankProcesses
from host.modules import import_path, module_command

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder with modules named like ours and others'; what importing any of them writes."""
    seen = tmp_path / "seen"
    for name in ("host", "serve", "finetune", "checkpoint", "torch", "yaml", "psutil", "json"):
        (tmp_path / f"{name}.py").write_text(f"open({str(seen)!r}, 'a').write({name + ' '!r})\nraise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", str(ROOT), ""]))
    return seen


def test_a_module_is_not_taken_from_the_working_directory(trap: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": import_path(os.environ)}
    done = subprocess.run(module_command("host.limits"), env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert not trap.exists()


def a_run(folder: Path) -> RunFile:
    """A run whose ranks refuse it, for its GPUs, once they have read it and imported torch."""
    config = TuneConfig(
        run=RunConfig(output=str(folder / "out"), device="cuda", ranks=1000),
        data=DataConfig(train=(str(folder),)),
        model=ModelConfig(path=str(folder)),
    )
    return RunFile(config=config)


def test_ranks_of_training_take_no_module_from_the_working_directory(trap: Path, tmp_path: Path) -> None:
    with (
        RankProcesses(tmp_path / "out", a_run(tmp_path), ranks=1, threads=1) as ranks,
        pytest.raises(FinetuneError, match="the GPUs torch sees"),
    ):
        ranks.wait()
    assert not trap.exists()


@pytest.mark.parametrize("kernel", [None, "killed by the kernel for memory: the container's limit is 2.0 GiB"])
def test_a_rank_of_training_that_was_killed_for_memory_is_told_from_any_other(
    kernel: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "killed_for_memory", lambda before: kernel)
    (tmp_path / "sitecustomize.py").write_text(
        "import signal, sys\nif 'finetune.launch.rank' in sys.orig_argv: signal.pause()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with RankProcesses(tmp_path / "out", a_run(tmp_path), ranks=1, threads=1) as ranks:
        os.kill(ranks.process_ids[0], signal.SIGKILL)
        with pytest.raises(FinetuneError, match=f"rank 0 was {kernel or r'killed .SIGKILL.: by hand, or by the system'}"):
            ranks.wait()
