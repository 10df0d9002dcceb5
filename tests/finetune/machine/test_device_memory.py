"""Segments of a GPU's memory that grow, where its driver maps memory and the user's settings leave that open."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest

from finetune.machine import device_memory
from finetune.machine.device_memory import allocator_settings, let_segments_grow


class _Driver:
    """Stands for CUDA's, with the names of cuda.h: a number for each GPU, and whether its memory can be mapped."""

    def __init__(self, able: Sequence[bool], *, init: int = 0) -> None:
        self._able, self._init = able, init

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return self._init

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self._able)
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 100 + ordinal
        return 0

    def cuDeviceGetAttribute(self, value: Any, which: int, device: Any) -> int:
        value._obj.value = int(which == 102 and self._able[device.value - 100])
        return 0


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": ""}, "expandable_segments:True"),
        (
            {"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.25"},
            "per_process_memory_fraction:0.25,expandable_segments:True",
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, "max_split_size_mb:128,expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8, expandable_segments:False"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, None),
    ],
)
def test_the_users_settings_of_the_allocator_stay(given: dict[str, str], settings: str | None) -> None:
    assert allocator_settings(given) == settings


@pytest.mark.parametrize(
    ("able", "init", "grow"),
    [([True, True], 0, True), ([True, False], 0, False), ([], 0, False), ([True], 100, False)],
)
def test_segments_grow_where_every_gpu_maps_memory(
    able: list[bool], init: int, grow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory.ctypes, "CDLL", lambda name: {"libcuda.so.1": _Driver(able, init=init)}[name])
    environment = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    let_segments_grow(environment)
    assert environment["PYTORCH_ALLOC_CONF"].endswith("expandable_segments:True") == grow


def test_without_a_driver_the_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(device_memory.ctypes, "CDLL", missing)
    environment = dict[str, str]()
    let_segments_grow(environment)
    assert environment == {}
