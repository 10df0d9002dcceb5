"""What is asked of a disk before a run, and the buffers that follow: no disk is measured here and nothing is built."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import pytest

from finetune.config import OffloadConfig, TuneConfig
from finetune.errors import ConfigError
from finetune.machine import inventory, nvme, ops
from finetune.machine.nvme import MEASURED, Disk, disk_settings, prepare_disk
from tests.finetune.forecast.support import config_of

DISK = Disk(block_bytes=1 << 18, queue_depth=32, threads=2, read_gib_s=2.5, write_gib_s=1.25)
Room = Callable[[int], None]


def tune(tmp_path: Path, ranks: int = 1, device: str = "cpu", **offload: Any) -> TuneConfig:
    run = {"output": "x", "ranks": ranks, "device": device}
    return config_of(run=run, offload=OffloadConfig(path=str(tmp_path), **offload))


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    def leave(free: int) -> None:
        usage = shutil.disk_usage("/")
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))

    leave(1 << 60)
    return leave


@pytest.mark.parametrize("seed", range(12))
def test_there_is_a_buffer_for_the_largest_part_and_for_all_that_may_come_ahead_of_it(
    tmp_path: Path, room: Room, seed: int
) -> None:
    draw = random.Random(seed)
    ranks, width = draw.choice([1, 2, 4]), draw.choice([2, 4])
    shapes = {
        str(n): tuple(draw.choice([7, 64, 900, 3000]) for _ in range(draw.randint(1, 2))) for n in range(draw.randint(1, 9))
    }
    settings = disk_settings(tune(tmp_path, ranks, parameters="nvme"), DISK, tmp_path / "own", shapes, width)
    parts = [-(-prod(shape) // ranks) for shape in shapes.values()]
    assert settings.buffer_elements == max(parts)
    assert settings.sub_group_elements == max(max(parts), min(50_000_000, sum(parts)))
    swapped = [part for part in parts if part * width >= 1 << 20]
    runs = [swapped[begin:end] for begin, end in itertools.combinations(range(len(swapped) + 1), 2)]
    most = max((len(run) for run in runs if sum(run) <= max(parts)), default=0)
    assert settings.buffers == most + 4
    assert (settings.folder, settings.block_bytes, settings.queue_depth, settings.threads) == (
        str(tmp_path / "own"),
        1 << 18,
        32,
        2,
    )


@pytest.mark.parametrize(
    ("offload", "bytes_each"),
    [
        ({"optimizer": "nvme"}, 16),
        ({"optimizer": "cpu", "parameters": "nvme"}, 2),
        ({"optimizer": "nvme", "parameters": "nvme"}, 18),
    ],
)
def test_a_disk_needs_room_for_what_goes_there_to_the_last_byte(
    tmp_path: Path, room: Room, offload: dict[str, str], bytes_each: int
) -> None:
    shapes = {"weight": (1 << 10, 1 << 20)}
    room(bytes_each << 30)
    disk_settings(tune(tmp_path, **offload), DISK, tmp_path / "own", shapes, 2)
    room((bytes_each << 30) - 1)
    rule = rf"offload\.path: {tmp_path} has {bytes_each}\.0 GiB free; this model needs {bytes_each}\.0; name a larger disk"
    with pytest.raises(ConfigError, match=rule):
        disk_settings(tune(tmp_path, **offload), DISK, tmp_path / "own", shapes, 2)


# -- measuring it


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Both operations are there; lists those that were asked for."""
    asked: list[str] = []
    monkeypatch.setattr(ops, "ensure", lambda op, _: asked.append(op) or ops.Built(True, ""))
    monkeypatch.setattr(ops, "library_of", lambda op: tmp_path)
    monkeypatch.setattr(inventory, "libaio", lambda: "/usr/include/libaio.h")
    return asked


def measuring(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(nvme, "module_command", lambda _: ["/bin/sh", "-c", script])


def test_a_disk_is_measured_once_and_what_is_damaged_is_measured_again(
    tmp_path: Path, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring(monkeypatch, f"echo warm; echo '{json.dumps(asdict(DISK))}'")
    said: list[str] = []
    assert prepare_disk(tmp_path / "own", said.append) == DISK
    assert built == [ops.PIN_MEMORY, ops.ASYNC_IO]
    assert said == [
        f"measuring the disk of {tmp_path} once, about 10 s",
        "the disk reads 2.5 GiB/s and writes 1.2: blocks of 256 KiB, 32 in flight, 2 threads",
    ]
    measuring(monkeypatch, "exit 1")
    assert prepare_disk(tmp_path / "own", said.append) == DISK
    assert len(said) == 2, "it was measured before"
    measuring(monkeypatch, f"echo '{json.dumps({**asdict(DISK), 'threads': 1})}'")
    for damaged in ("", "{", "[]", '{"threads": 1}', '{"more": 1}'):
        (tmp_path / MEASURED).write_text(damaged)
        assert prepare_disk(tmp_path / "own", said.append).threads == 1
        assert said[-1].endswith("32 in flight, 1 thread")


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo first >&2; echo 'OSError: O_DIRECT' >&2; exit 3", "direct file access failed: OSError: O_DIRECT"),
        ("exit 3", "direct file access failed: Command"),
        ("echo not json", "the disk could not be measured: "),
        ("true", "the disk could not be measured: "),
        ("echo '{}'", "the disk could not be measured: "),
    ],
)
def test_a_disk_that_cannot_be_measured_is_refused_by_its_folder(
    tmp_path: Path, built: list[str], monkeypatch: pytest.MonkeyPatch, script: str, told: str
) -> None:
    measuring(monkeypatch, script)
    with pytest.raises(ConfigError) as refused:
        prepare_disk(tmp_path / "own", lambda _: None)
    assert str(refused.value).startswith(f"offload.path: {tmp_path}: {told}")
    assert not (tmp_path / MEASURED).exists()


def test_an_operation_that_cannot_be_built_names_why_and_another_place(
    tmp_path: Path, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "ensure", lambda op, _: ops.Built(op == ops.PIN_MEMORY, f"no ninja for {op}"))
    with pytest.raises(ConfigError, match=r"^offload: nvme needs it, but no ninja for async_io; or offload to cpu$"):
        prepare_disk(tmp_path / "own", lambda _: None)
