"""NVMe offload: the same training as in memory, checked before it starts, resumed exactly."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.config import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OffloadConfig,
    RunConfig,
    TokenizerConfig,
    TuneConfig,
    to_deepspeed,
)
from finetune.errors import ConfigError
from finetune.machine import inventory
from finetune.machine.nvme import MEASURED, Disk, disk_settings
from tests.finetune.support import COMMAND, NEEDS_LIBAIO, ROOT, run_command, small_run, write_config
from tests.finetune.train.test_tune import losses_of, start_command, until_training

DISK = Disk(block_bytes=1 << 20, queue_depth=8, threads=1, read_gib_s=1.0, write_gib_s=1.0)
MODEL = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2048, "num_hidden_layers": 2}
"""Large enough for tensors of several mebibytes: smaller ones stay in memory."""


def tree(text: Path, folder: Path, **offload: str) -> dict[str, Any]:
    made = small_run(text, folder / "run", offload=offload, schedule={"steps": 8, "warmup": 2}, save={"every": 4})
    made["model"]["new"] |= MODEL
    made["eval"] = {"every": 0}
    return made


def config(tmp_path: Path, **offload: Any) -> TuneConfig:
    return TuneConfig(
        run=RunConfig(output="out", ranks=2),
        data=DataConfig(train=("text",)),
        model=ModelConfig(new={"model_type": "gpt_neox"}),
        tokenizer=TokenizerConfig(path="somewhere"),
        batch=BatchConfig(micro=1),
        offload=OffloadConfig(path=str(tmp_path), **offload),
    )


WITHOUT_LOCKS = """
import ctypes, os, resource, sys
DROP_FROM_BOUNDING_SET, IPC_LOCK = 24, 14
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
ctypes.CDLL(None).prctl(DROP_FROM_BOUNDING_SET, IPC_LOCK, 0, 0, 0)  # refused where nobody has it anyway
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a command that may lock no memory, also as root, as in a container."""


@pytest.fixture(scope="module")
def in_memory(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("memory")
    done = run_command("tune", write_config(tree(text_folder, folder, optimizer="cpu", parameters="cpu"), folder / "run.yaml"))
    assert done.returncode == 0, done.stderr
    return losses_of(folder / "run")


@pytest.mark.slow
@NEEDS_LIBAIO
def test_a_disk_trains_as_memory_does_without_locked_memory_beside_another_run_and_resumes_exactly(
    text_folder: Path, tmp_path: Path, in_memory: dict[int, float]
) -> None:
    disk = tmp_path / "disk"
    path = write_config(tree(text_folder, tmp_path, optimizer="nvme", parameters="nvme", path=str(disk)), tmp_path / "run.yaml")
    words = ["--run.output", tmp_path / "other", "--run.seed", "1", "--schedule.steps", "100000"]
    with start_command(["tune", path, *words]) as other:
        try:
            command = [sys.executable, "-c", WITHOUT_LOCKS, *COMMAND, "tune", str(path)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr
            assert "optimizer on nvme and parameters on nvme" in done.stdout
            assert losses_of(tmp_path / "run") == in_memory, "another run with the same offload.path took part"
            until_training(other, tmp_path / "other")
            (left,) = disk.glob("tessera-run-*")
        finally:
            other.kill()
    with (left / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # once its ranks have followed it
    assert sum(file.stat().st_size for file in left.rglob("*.swp")) > 8 << 20, "nothing was on the disk"
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "run", resumed)
    for root in ("checkpoints", "resume"):
        shutil.rmtree(resumed / root / "step-00000008")
        (resumed / root / "latest").write_text("step-00000004\n")
    done = run_command("tune", path, "--resume", "--run.output", resumed)
    assert done.returncode == 0, done.stderr
    assert "measuring the disk" not in done.stdout, "it was measured before"
    assert f"MiB of swap files in {left}, left by a run that was killed" in done.stdout.replace("\n", "")
    assert [file.name for file in disk.iterdir()] == [MEASURED]
    assert losses_of(resumed) == in_memory
    for name in ("model.safetensors", "config.json"):
        ours, whole = (run / "checkpoints" / "step-00000008" / name for run in (resumed, tmp_path / "run"))
        assert ours.read_bytes() == whole.read_bytes()


def test_buffers_follow_from_the_models_sizes(tmp_path: Path) -> None:
    shapes = {"embedding": (1000, 4096), "bias": (4096,), "first": (512, 4096), "second": (512, 4096)}
    settings = disk_settings(config(tmp_path, parameters="nvme"), DISK, tmp_path / "own", shapes, 2)
    assert settings.buffer_elements == 1000 * 4096 // 2, "one rank's part of the largest tensor"
    assert settings.buffers == 1 + 4, "one part of the largest tensor's size may come ahead"
    assert settings.sub_group_elements == sum((1000 * 4096, 4096, 512 * 4096 * 2)) // 2
    json = to_deepspeed(config(tmp_path, parameters="nvme"), device="cpu", precision="bf16", cpu_adam=True, disk=settings)
    assert json["zero_optimization"]["offload_param"]["nvme_path"] == str(tmp_path / "own")
    assert json["zero_optimization"]["stage3_prefetch_bucket_size"] <= settings.buffer_elements
    assert json["aio"]["block_size"] == 1 << 20


def test_too_small_a_disk_is_refused_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 1 << 40, 1 << 30))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"offload.path: .* has 1.0 GiB free; this model needs 16\.\d"):
        disk_settings(config(tmp_path, optimizer="nvme"), DISK, tmp_path / "own", {"embedding": (1 << 20, 1 << 10)}, 2)


def test_a_missing_library_is_named_with_its_remedy(text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.machine.nvme import prepare_disk

    monkeypatch.setattr(inventory, "libaio", lambda: None)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="apt-get install libaio-dev"):
        prepare_disk(tmp_path / "own", lambda _: None)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--offload.optimizer", "nvme"], "offload.path"),
        (["--offload.optimizer", "nvme", "--offload.path", "/proc/nowhere"], "offload.path: /proc/nowhere cannot be written"),
        (["--offload.path", "somewhere"], "be absent when nothing is offloaded to nvme"),
        (["--offload.optimizer", "nvme", "--offload.path", "x", "--zero.stage", "2"], "unless zero.stage is 3"),
        (["--offload.ratio", "0.5"], "offload.ratio"),
        (["--offload.optimizer", "cpu", "--offload.method", "superoffload"], "it needs CUDA"),
        (["--offload.method", "zenflow"], "offload.method is 'zenflow'; it must be left alone unless offload.optimizer is cpu"),
        (["--run.precision", "fp16"], "run.precision is 'fp16'; it must be bf16 or fp32 on the CPU"),
        (["--run.precision", "fp16", "--run.device", "auto"], "run.precision: fp16 needs CUDA, and no GPU was found"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(text_folder: Path, tmp_path: Path, words: list[str], told: str) -> None:
    path = write_config(small_run(text_folder, tmp_path / "run"), tmp_path / "run.yaml")
    done = run_command("tune", path, *words)
    assert done.returncode == 2, done.stdout
    assert told in done.stderr
    assert "Traceback" not in done.stderr
