"""Which device ranks train on, by what each of them sees."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from rich.console import Console

from finetune.config import TuneConfig
from finetune.errors import ConfigError
from finetune.launch import external, rank
from finetune.launch.instructions import RunFile
from finetune.launch.rank import choose_device, prepare_process
from tests.finetune.forecast.support import config_of


@pytest.mark.parametrize(
    ("wanted", "gpus", "given"), [("auto", 8, "cuda"), ("cuda", 8, "cuda"), ("cpu", 1, "cpu"), ("auto", 0, "cpu")]
)
def test_ranks_of_a_launcher_take_a_gpu_each_of_those_that_all_of_them_see(
    wanted: Any, gpus: int, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = config_of(run={"device": wanted})
    assert choose_device(config, local_ranks=8, by_launcher=True) == given


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_launcher_that_shows_each_rank_one_gpu_is_told_to_show_all(wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else ``auto`` would train on the CPU, and say nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    says = rf"^run.device is {wanted}; 8 ranks run on this machine, and this one sees 1 GPUs: let each rank see .*cpu$"
    with pytest.raises(ConfigError, match=says):
        choose_device(config_of(run={"device": wanted}), local_ranks=8, by_launcher=True)


def test_a_launchers_rank_asks_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict[str, Any]()

    def choose(config: TuneConfig, **how: Any) -> str:
        asked.update(how)
        raise ConfigError("seen")

    monkeypatch.setattr("finetune.launch.rank.choose_device", choose)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with ExitStack() as stack, pytest.raises(ConfigError, match="seen"):
        external._rank(config_of(), Console(), threading.Event(), stack, command="tune", anyway=False)
    assert asked == {"local_ranks": 8, "by_launcher": True}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_take_a_gpus_memory_in_segments_that_grow(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setenv("DS_ACCELERATOR", "")
    monkeypatch.setattr("finetune.launch.rank.let_segments_grow", asked.append)
    prepare_process(device)
    assert os.environ["DS_ACCELERATOR"] == device
    assert asked == [os.environ] * (device == "cuda")


def test_both_ways_of_starting_ranks_prepare_the_process_before_deepspeed_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(device: str) -> None:
        raise ConfigError(f"prepared for {device}")

    monkeypatch.setattr("finetune.launch.rank.prepare_process", seen)
    config = config_of(run={"device": "cpu"})
    with ExitStack() as stack, pytest.raises(ConfigError, match=r"^prepared for cpu$"):
        external._rank(config, Console(), threading.Event(), stack, command="tune", anyway=False)
    with pytest.raises(ConfigError, match=r"^prepared for cpu$"):
        rank._train(RunFile(config=config, command="tune", anyway=False), 0, threading.Event())
