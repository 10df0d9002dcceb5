"""A whole run's needs against what there is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from finetune.config import ModelConfig, OffloadConfig, SaveConfig, ZeroConfig
from finetune.errors import ConfigError
from finetune.forecast.estimate import model_config_of
from tests.finetune.forecast.support import NEW, config_of, forecast_of, hardware


def test_disk_counts_what_is_kept_and_the_save_being_written(tmp_path: Path) -> None:
    found = forecast_of(config_of(tmp_path / "run", save=SaveConfig(keep=2)))
    weights = 4 * found.facts.total
    assert found.checkpoint_bytes == pytest.approx(weights, abs=4 << 20)
    assert found.resume_bytes == pytest.approx(3 * weights, abs=4 << 20)
    assert found.saves == 3
    assert found.disk_bytes == 3 * (found.checkpoint_bytes + found.resume_bytes)
    without = forecast_of(config_of(tmp_path / "run", save=SaveConfig(keep=1, resume_state=False)))
    assert without.disk_bytes == 2 * without.checkpoint_bytes


def test_every_shortage_is_named() -> None:
    room = hardware(device="cuda", gpus=1, gpu_bytes=1 << 20, ram_bytes=1 << 20, disk_bytes=1 << 20)
    found = forecast_of(config_of(run={"device": "auto"}), room).shortages()
    assert [sentence.split(":")[0].split(" is")[0] for sentence in found] == [
        "run.ranks",
        "device memory of one rank",
        "host memory",
        "disk space",
    ]


def test_what_superoffload_shares_between_processes_must_fit_where_they_share_it() -> None:
    sections = {"zero": ZeroConfig(stage=3), "save": SaveConfig(resume_state=False), "run": {"device": "cuda"}}
    room = hardware(device="cuda", gpus=2, gpu_bytes=1 << 40, shared_bytes=1 << 20)
    for method, missing in (("superoffload", ["space in /dev/shm"]), ("plain", [])):
        offload = OffloadConfig(optimizer="cpu", method=method)  # type: ignore[arg-type]  # one of its names
        found = forecast_of(config_of(offload=offload, **sections), room)
        assert found.shared_bytes == (8 * found.facts.trained if missing else 0)
        assert [sentence.split(":")[0] for sentence in found.shortages()] == missing


def test_what_cannot_be_is_refused_as_a_run_would() -> None:
    with pytest.raises(ConfigError, match="hiden_size"):
        model_config_of(config_of(new={**NEW, "hiden_size": 3}))
    missing = dataclasses.replace(config_of(), model=ModelConfig(path="nowhere"))
    with pytest.raises(ConfigError, match="nowhere"):
        model_config_of(missing)
