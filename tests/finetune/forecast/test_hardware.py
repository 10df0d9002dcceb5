"""The room a run is compared with: what this machine has, what is said of another, and what nobody knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.config import OffloadConfig, TuneConfig
from finetune.errors import ConfigError
from finetune.forecast import hardware, least
from finetune.forecast.hardware import Hardware, described_machine, free_bytes, this_machine
from finetune.machine import inventory
from tests.finetune.forecast.support import GIB, config_of

NOTHING: dict[str, Any] = {"gpus": None, "gpu_gib": None, "ram_gib": None, "nvme_gib": None, "disk_gib": None}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """A machine of 64 GiB of which 40 are free; its GPUs are what is put into the list."""
    gpus: list[int | None] = []
    monkeypatch.setattr(inventory, "gpu_memory_bytes", lambda: gpus)
    monkeypatch.setattr(inventory, "memory_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(hardware.limits, "memory_available", lambda: 40 * GIB)
    return gpus


def on(device: str, ranks: int = 2) -> TuneConfig:
    return config_of("out", run={"device": device, "ranks": ranks})


@pytest.mark.parametrize(
    ("gpus", "device", "ranks", "found"),
    [
        ([], "auto", 1, ("cpu", None)),
        ([], "cuda", 1, ("cpu", None)),
        ([24 * GIB, 16 * GIB], "auto", 2, ("cuda", 16 * GIB)),
        ([24 * GIB, 16 * GIB], "auto", 3, ("cpu", None)),
        ([24 * GIB, 16 * GIB], "cuda", 3, ("cuda", 16 * GIB)),
        ([24 * GIB, 16 * GIB], "cpu", 1, ("cpu", None)),
        ([24 * GIB, None], "auto", 1, ("cuda", None)),
        ([None], "cuda", 1, ("cuda", None)),
    ],
)
def test_a_run_takes_the_gpus_if_there_is_one_a_rank(
    machine: list[int | None], gpus: list[int | None], device: str, ranks: int, found: tuple[str, int | None]
) -> None:
    machine.extend(gpus)
    here = this_machine(on(device, ranks))
    assert (here.device, here.gpu_bytes) == found
    assert here.gpus == len(gpus)
    assert not here.described


def test_what_the_run_holds_already_is_room_and_never_more_than_there_is(machine: list[int | None]) -> None:
    assert [this_machine(on("cpu"), already_taken=taken * GIB).ram_bytes // GIB for taken in (0, 4, 100)] == [40, 44, 64]


@pytest.mark.parametrize(
    ("words", "device", "expected"),
    [
        (NOTHING, "auto", {"device": "cpu", "described": False, "ram_bytes": 40 * GIB}),
        ({"ram_gib": 0.5}, "auto", {"device": "cpu", "described": True, "ram_bytes": GIB // 2}),
        ({"gpu_gib": 80}, "auto", {"device": "cuda", "gpus": 2, "gpu_bytes": 80 * GIB, "described": True}),
        ({"gpus": 8}, "auto", {"device": "cuda", "gpus": 8, "gpu_bytes": None}),
        ({"gpus": 0, "gpu_gib": 80}, "auto", {"device": "cpu", "gpus": 0, "gpu_bytes": None}),
        ({"gpus": 8, "gpu_gib": 80}, "cpu", {"device": "cpu", "gpus": 8, "gpu_bytes": None}),
        ({"nvme_gib": 2}, "auto", {"nvme_bytes": 2 * GIB, "described": True}),
        ({"disk_gib": 3}, "auto", {"disk_bytes": 3 * GIB, "described": True}),
    ],
)
def test_what_is_said_of_a_machine_stands_in_the_place_of_what_is_here(
    machine: list[int | None], words: dict[str, Any], device: str, expected: dict[str, Any]
) -> None:
    made = described_machine(on(device), **{**NOTHING, **words})
    assert {name: getattr(made, name) for name in expected} == expected


def test_room_on_a_disk_is_that_where_the_folder_would_be_made(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "yet" / "made") is not None
    assert free_bytes(Path("relative/and/not/there")) is not None
    swap = replace(config_of("out"), offload=OffloadConfig(optimizer="nvme", path=str(tmp_path)))
    assert this_machine(swap).nvme_bytes is not None
    assert this_machine(config_of("out")).nvme_bytes is None


def test_a_model_is_not_refused_for_want_of_what_nobody_knows(
    machine: list[int | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    huge = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672}
    config = config_of("out", new={**huge, "num_attention_heads": 64, "vocab_size": 128000}, run={"device": "cuda", "ranks": 1})
    machine.append(None)
    least.check_least(config)
    machine[0] = 80 * GIB
    with pytest.raises(ConfigError, match=r"does not fit this machine: host memory and device memory: needs .* of 120 GiB"):
        least.check_least(config)
    room = Hardware(device="cuda", gpus=1, gpu_bytes=1, ram_bytes=4000 * GIB, disk_bytes=None, nvme_bytes=None)
    monkeypatch.setattr(least, "this_machine", lambda _: room)
    least.check_least(config)


def test_what_processes_may_share_is_looked_up_and_unknown_of_a_machine_that_is_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("finetune.forecast.hardware.shutil.disk_usage", lambda folder: SimpleNamespace(free=len(str(folder))))
    assert this_machine(config_of()).shared_bytes == len("/dev/shm")
    nothing: dict[str, Any] = {"gpus": 1, "gpu_gib": 80.0, "nvme_gib": None, "disk_gib": None}
    assert described_machine(config_of(), ram_gib=None, **nothing).shared_bytes == len("/dev/shm")
    assert described_machine(config_of(), ram_gib=64.0, **nothing).shared_bytes is None
