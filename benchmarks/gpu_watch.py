"""What a run of training makes of the device and of the disk while it takes steps: looked at from beside it, by the clock.

A run tells in its log how many steps it has taken. What is looked at counts from the step behind the first ones, which allocate
and compile, to the last one, which saves: neither the start nor the end of a run says anything about its steps.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu_record import why
from finetune.output.log import read_log
from serve.runtime.gpu_figures import Nvml

_PERIOD_SECONDS: Final = 0.1
"""NVML's own figure is of the sixth of a second to the second before it is asked."""
NO_STEPS: Final = "not told: its steps were over before anybody looked"

Row = dict[str, Any]
Use = Callable[[], float | None]
"""The share of the time in which a device did anything, as it is just now; ``None`` where that is not told."""


def use_of(uuid: str) -> Use | str:
    """How busy NVML says that a GPU is; or why it cannot be asked.

    Args:
        uuid: as the driver names the GPU, ``GPU-…``.
    """
    try:
        nvml = Nvml()
    except ImportError:
        return "not told: nvidia-ml-py is not installed, which the extra gpu brings"
    except Exception as error:  # no driver, or not one that fits: the record says it
        return f"not told: {why(error)}"
    return lambda: nvml.figures(0, uuid).utilization_ratio


@dataclass(slots=True)
class Watch:
    """One run, looked at while it goes."""

    log: Path
    """Where it tells of its steps."""
    steps: range
    """After how many steps taken what is seen counts."""
    use: Use | str
    """Of the device, or why it is not known."""
    with_disk: bool
    """Whether what it reads and writes of disks is looked at, too."""
    _shares: list[float] = field(init=False, default_factory=list)
    _moved: list[tuple[float, int, int, int]] = field(init=False, default_factory=list)
    """When first so many steps were taken: time, steps, and bytes that were read and written by then."""
    _fault: str = field(init=False, default="")
    _is_over: threading.Event = field(init=False, default_factory=threading.Event)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look within, in a thread."""
        thread = threading.Thread(target=self._look, daemon=True, name="watch")
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join(10.0)  # a driver may keep it waiting for ever

    def _look(self) -> None:
        while not self._is_over.wait(_PERIOD_SECONDS):
            try:
                self._look_once()
            except Exception as error:  # a run does not fail since it cannot be watched; what is told of it says so
                self._fault = f"not told: {why(error)}"
                return

    def _look_once(self) -> None:
        taken = len({line["step"] for line in read_log(self.log) if "loss" in line}) if self.log.is_file() else 0
        if taken not in self.steps:
            return
        if not isinstance(self.use, str) and (share := self.use()) is not None:
            self._shares.append(share)
        if self.with_disk and (not self._moved or self._moved[-1][1] != taken):
            self._moved.append((time.monotonic(), taken, *moved_bytes(os.getpid())))

    def busy(self) -> Row:
        """The device's busy share: the mean of what was seen, and how often it was looked at; or why it is not known."""
        if isinstance(self.use, str) or not self._shares:
            return {"device_busy": self.use if isinstance(self.use, str) else self._fault or NO_STEPS}
        return {"device_busy": {"share": statistics.mean(self._shares), "looks": len(self._shares)}}

    def moved(self) -> Row:
        """What was read from disks and written to them: bytes a step, and 10^9 bytes a second of the steps' whole time."""
        if len(self._moved) < 2:
            return {"moved": self._fault or NO_STEPS}
        (began, first, *before), (ended, last, *after) = self._moved[0], self._moved[-1]
        found: Row = {"steps": last - first, "seconds": ended - began}
        for name, old, new in zip(("read", "written"), before, after, strict=True):
            found[name] = {"bytes_per_step": (new - old) / (last - first), "gb_s": (new - old) / 1e9 / (ended - began)}
        if not any(found[name]["bytes_per_step"] for name in ("read", "written")):
            return {"moved": "not told: the system counted no bytes, as it does of a folder in memory"}
        return {"moved": found}


def moved_bytes(parent: int) -> tuple[int, int]:
    """Bytes that the processes below one have read from disks, and have written to them, as Linux counts them for each.

    What lay in its cache is not read from a disk. A process that has ended counts no more.

    Raises:
        PermissionError: of a process of another user.
    """
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        children.setdefault(int(fields[1]), []).append(int(status.parent.name))
    below = list(children.get(parent, ()))
    for process in below:  # grows by those below each
        below += children.get(process, ())
    read = written = 0
    for process in below:
        try:
            lines = Path(f"/proc/{process}/io").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        counted = dict(line.split(": ") for line in lines)
        read, written = read + int(counted["read_bytes"]), written + int(counted["write_bytes"])
    return read, written
