"""What must be gone when a fault is over: processes, what they held open, names in shared memory, files, control groups."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support import shared_memory
from tests.support.server import Server, lives, until
from tests.support.shared_memory import abandoned, in_shared_memory

_GOES_WITHIN_SECONDS = 60
"""What was killed or closed has a while to go, on a machine that has much else to do."""
GROUP_NAME = f"tessera-chaos-{os.getpid()}"
"""Of the control group that a case makes."""


class Leftovers:
    """Processes that were seen and must end, and names in shared memory that came since."""

    def __init__(self) -> None:
        self._shared = in_shared_memory()
        self._seen: set[int] = set()

    def saw(self, pids: Sequence[int]) -> None:
        """These processes are there."""
        self._seen.update(pids)

    def left(self, still_used: Sequence[int] = ()) -> list[str]:
        """What is there still and must not be."""
        gone = self._seen - set(still_used)
        _wait(lambda: not any(lives(pid) for pid in gone))
        return [f"process {pid}" for pid in gone if lives(pid)] + sorted(abandoned(self._shared))


class Held:
    """What a server that outlives a fault holds before it, and must not hold more of afterwards: processes and descriptors."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = self._now()

    def _now(self) -> Counter[str]:
        return _names_below(self._pid) + descriptors(self._pid)

    def more(self, within_seconds: float = _GOES_WITHIN_SECONDS) -> list[str]:
        """What there is more of: dead ranks that nobody looked after count, too."""
        _wait(lambda: not self._now() - self._before, within_seconds)
        return [f"{number} more {what}" for what, number in sorted((self._now() - self._before).items())]


class Surroundings:
    """What a run of cases found in its machine and must leave as it was, whatever was killed meanwhile.

    Processes of the run are known by the folder for temporary files that they were told.
    """

    def __init__(self) -> None:
        self._processes = _of_this_run()
        self._shared = in_shared_memory()
        self._files = _temporary_files()

    def left(self, server: Server | None, within_seconds: float = _GOES_WITHIN_SECONDS) -> list[str]:
        """What is there beside what was.

        Args:
            server: one that goes on: its processes may be there.
            within_seconds: how long what is there may take to go.
        """
        used = set(self._processes) | (set() if server is None else {server.process.pid, *_below(server.process.pid)})
        _wait(lambda: not _of_this_run().keys() - used, within_seconds)
        processes = [f"process {name} ({pid})" for pid, name in _of_this_run().items() if pid not in used]
        files = [f"file {name}" for name in sorted(_temporary_files() - self._files)]
        shared = [str(shared_memory.FOLDER / name) for name in sorted(abandoned(self._shared))]
        groups = [str(place) for place in Path("/sys/fs/cgroup").glob(f"**/{GROUP_NAME}")]
        return processes + files + shared + groups


def _wait(condition: Callable[[], bool], within_seconds: float = _GOES_WITHIN_SECONDS) -> None:
    with suppress(AssertionError):
        until(condition, seconds=within_seconds)


def _temporary_files() -> set[str]:
    folder = Path(tempfile.gettempdir())
    return {str(place.relative_to(folder)) for place in folder.rglob("*")}


def _of_this_run() -> dict[int, str]:
    """Processes that were told this run's folder for temporary files, by number, with their names."""
    told = f"TMPDIR={tempfile.gettempdir()}".encode()
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is not ours to look into
            if int(place.name) != os.getpid() and told in (place / "environ").read_bytes().split(b"\0"):
                found[int(place.name)] = (place / "comm").read_text().strip()
    return found


def _below(pid: int) -> list[int]:
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def _names_below(pid: int) -> Counter[str]:
    """How many processes of each name are below a server, dead ones of which nobody took note included."""
    names = Counter[str]()
    for child in _below(pid):
        with suppress(OSError):
            names["process " + Path(f"/proc/{child}/comm").read_text().strip()] += 1
    return names


def descriptors(pid: int) -> Counter[str]:
    """How many descriptors of each kind a process has."""
    kinds = Counter[str]()
    for place in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it was closed since
            name = re.sub(r":\[\d+\]$", "", os.readlink(place))
            kinds["descriptor of " + re.sub(r"/step-\d+", "/step-*", name)] += 1  # what is served is held, whichever step it is
    return kinds
