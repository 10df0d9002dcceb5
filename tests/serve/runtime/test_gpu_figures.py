"""What the metrics have of GPUs, by a module that stands for NVML's."""

from __future__ import annotations

import logging
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from serve.runtime.gpu_figures import GpuWatch
from serve.series import GpuSeries, Maker

ONE, OTHER, SLICE = "GPU-1111", "GPU-2222", "MIG-3333"


class NVMLError(Exception):
    pass


class Pynvml(ModuleType):
    """Knows two GPUs and a slice, which tells its memory alone."""

    NVMLError, NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = NVMLError, 1, 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.known = {ONE, OTHER, SLICE}
        self.answers = threading.Event()
        self.answers.set()
        self.num_asked = 0

    def nvmlInit(self) -> None:
        self.num_asked += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert self.answers.wait(60)
        if uuid not in self.known:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=30, total=80)

    def _whole(self, handle: str) -> None:
        if handle == SLICE:
            raise NVMLError("Not Supported")

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._whole(handle)
        return SimpleNamespace(gpu=75)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._whole(handle)
        return 350_500

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        self._whole(handle)
        assert kind == self.NVML_CLOCK_SM
        return 1980

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        self._whole(handle)
        assert kind == self.NVML_TEMPERATURE_GPU
        return 64


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Pynvml:
    module = Pynvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


class Shown:
    """Series of GPUs that are looked at."""

    def __init__(self, *names: str) -> None:
        self._registry = CollectorRegistry()
        self.series = GpuSeries(Maker(self._registry))
        self.series.names = names
        self.watch = GpuWatch(self.series)

    def look(self) -> dict[tuple[str, str], dict[str, float]]:
        """By rank and GPU: what is told of it after another look."""
        self.watch.look()
        self.watch.wait()
        return self.now()

    def now(self) -> dict[tuple[str, str], dict[str, float]]:
        found: dict[tuple[str, str], dict[str, float]] = {}
        for family in self._registry.collect():
            for sample in family.samples:
                told = found.setdefault((sample.labels["rank"], sample.labels["gpu"]), {})
                told[sample.name.removeprefix("tessera_gpu_")] = sample.value
        return found


def test_each_ranks_gpu_is_told_in_base_units(nvml: Pynvml) -> None:
    told = Shown(OTHER, ONE).look()
    assert told.keys() == {("0", OTHER), ("1", ONE)}
    assert told["0", OTHER] == {
        "memory_used_bytes": 30, "memory_bytes": 80, "utilization_ratio": 0.75, "temperature_celsius": 64,
        "power_watts": 350.5, "clock_hertz": 1.98e9,
    }  # fmt: skip


def test_a_slice_tells_what_it_knows_and_a_gpu_that_is_gone_is_shown_no_longer(nvml: Pynvml) -> None:
    assert Shown(SLICE).look() == {("0", SLICE): {"memory_used_bytes": 30, "memory_bytes": 80}}
    shown = Shown(ONE, OTHER)
    assert shown.look().keys() == {("0", ONE), ("1", OTHER)}
    nvml.known.remove(OTHER)
    assert shown.look().keys() == {("0", ONE)}
    assert nvml.num_asked == 2, "begun once for each watch"


def test_a_driver_that_does_not_answer_keeps_nobody_waiting(nvml: Pynvml) -> None:
    shown = Shown(ONE)
    nvml.answers.clear()
    shown.watch.look()
    before = threading.active_count()
    for _ in range(5):
        shown.watch.look()
    assert threading.active_count() == before, "one look at a time"
    nvml.answers.set()
    shown.watch.wait()
    assert shown.now().keys() == {("0", ONE)}


def test_without_the_library_or_a_driver_there_are_no_series_and_it_is_said_once(
    nvml: Pynvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "serve")

    def missing() -> None:
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "nvmlInit", missing)
    shown = Shown(ONE)
    assert shown.look() == shown.look() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    shown = Shown(ONE)
    assert shown.look() == shown.look() == {}
    assert [record.getMessage() for record in caplog.records] == [
        "no metrics of GPUs: Driver Not Loaded",
        "no metrics of GPUs: nvidia-ml-py is not installed, which the extra gpu brings",
    ]


def test_a_server_without_gpus_asks_nobody(nvml: Pynvml) -> None:
    assert Shown().look() == {}
    assert nvml.num_asked == 0
