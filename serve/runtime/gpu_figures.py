"""What the ranks' GPUs are like, by NVML: memory, use, temperature, power and clock, for the metrics."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from serve.series import GpuFigures, GpuSeries

_MEGAHERTZ: Final = 1e6
_MILLIWATT: Final = 1e-3

_log = logging.getLogger(__name__)


class GpuWatch:
    """Looks at the GPUs from time to time, in a thread of its own: who asks a driver about a broken one may have to wait."""

    def __init__(self, series: GpuSeries) -> None:
        self._series = series
        self._nvml: Nvml | None = None
        self._thread: threading.Thread | None = None
        self._useless = False

    def look(self) -> None:
        """Begin to look, unless there is nothing to look at or the last look goes on still."""
        if self._useless or not self._series.names or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._look, daemon=True, name="gpus")
        self._thread.start()

    def wait(self) -> None:
        """Until the look that was begun has ended."""
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        try:
            self._nvml = nvml = self._nvml or Nvml()
        except ImportError:
            self._useless = True
            _log.info("no metrics of GPUs: nvidia-ml-py is not installed, which the extra gpu brings")
            return
        except Exception as error:
            self._useless = True
            _log.warning("no metrics of GPUs: %s", error)
            return
        self._series.tell([nvml.figures(rank, name) for rank, name in enumerate(self._series.names)])


class Nvml:
    """NVIDIA's management library, which knows a GPU without taking anything of it."""

    def __init__(self) -> None:
        """
        Raises:
            ImportError: its Python module is not installed.
            Exception: there is no driver, or not one that fits.
        """
        self._module: Any = importlib.import_module("pynvml")
        self._module.nvmlInit()

    def figures(self, rank: int, name: str) -> GpuFigures:
        """What a GPU tells; of a slice, or of one that is gone, some or all is not told."""
        nvml = self._module
        handle = self._told(lambda: nvml.nvmlDeviceGetHandleByUUID(name))
        if handle is None:
            return GpuFigures(rank=rank, gpu=name)
        memory = self._told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        use = self._told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        power = self._told(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        clock = self._told(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        return GpuFigures(
            rank=rank,
            gpu=name,
            memory_used_bytes=None if memory is None else memory.used,
            memory_bytes=None if memory is None else memory.total,
            utilization_ratio=None if use is None else use.gpu / 100,
            temperature_celsius=self._told(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            power_watts=None if power is None else power * _MILLIWATT,
            clock_hertz=None if clock is None else clock * _MEGAHERTZ,
        )

    def _told(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except self._module.NVMLError:
            return None
