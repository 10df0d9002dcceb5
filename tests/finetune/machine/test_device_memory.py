"""Segments of a GPU's memory that grow, where its driver maps memory and the user's settings leave that open."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest

from finetune.machine import cuda_devices
from finetune.machine.device_memory import let_segments_grow, with_growing_segments


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


ALLOC, CUDA_ALLOC, GROW = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({}, {ALLOC: GROW}),
        ({ALLOC: ""}, {ALLOC: GROW}),
        ({ALLOC: "per_process_memory_fraction:0.25"}, {ALLOC: f"per_process_memory_fraction:0.25,{GROW}"}),
        ({ALLOC: "max_split_size_mb:64, "}, {ALLOC: f"max_split_size_mb:64,{GROW}"}),
        # torch takes the second name's where both are there.
        ({CUDA_ALLOC: "max_split_size_mb:128"}, {CUDA_ALLOC: f"max_split_size_mb:128,{GROW}"}),
        (
            {ALLOC: "max_split_size_mb:64", CUDA_ALLOC: "max_split_size_mb:128"},
            {ALLOC: f"max_split_size_mb:64,{GROW}", CUDA_ALLOC: f"max_split_size_mb:128,{GROW}"},
        ),
        ({ALLOC: "garbage_collection_threshold:0.8, expandable_segments:False"}, {}),
        ({ALLOC: "max_split_size_mb:64", CUDA_ALLOC: "backend:cudaMallocAsync"}, {}),
    ],
)
def test_the_users_settings_of_the_allocator_stay(given: dict[str, str], settings: dict[str, str]) -> None:
    assert with_growing_segments(given) == settings


@pytest.mark.parametrize(
    ("able", "init", "grow"),
    [([True, True], 0, True), ([True, False], 0, False), ([], 0, False), ([True], 100, False)],
)
def test_segments_grow_where_every_gpu_maps_memory(
    able: list[bool], init: int, grow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_devices.ctypes, "CDLL", lambda name: {"libcuda.so.1": _Driver(able, init=init)}[name])
    environment = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    let_segments_grow(environment)
    assert environment["PYTORCH_ALLOC_CONF"].endswith("expandable_segments:True") == grow


def test_without_a_driver_the_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(cuda_devices.ctypes, "CDLL", missing)
    environment = dict[str, str]()
    let_segments_grow(environment)
    assert environment == {}
