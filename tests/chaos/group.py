"""A control group, and a program that takes all of its memory: ``python -m tests.chaos.group FOLDER VERSION``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PIECE_BYTES = 1 << 20


class Group:
    """A control group of version 1 or 2 with a limit of memory."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self.version = version
        self._limit, self._used, self._events = (
            ("memory.max", "memory.current", "memory.events")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
        )

    def add(self, pid: int) -> None:
        """Have a process, and all that it starts from now on, in the group."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def limit(self, more_bytes: int) -> None:
        """Let it have no more than so much beside what it has."""
        (self.folder / self._limit).write_text(str(int((self.folder / self._used).read_text()) + more_bytes))

    def num_kills(self) -> int:
        """How often the kernel has killed a process of the group for its memory."""
        rows = (line.split() for line in (self.folder / self._events).read_text().splitlines())
        return next((int(value) for name, value in rows if name == "oom_kill"), 0)


def take_all(group: Group) -> None:
    """Be that process, which gives all of it back at once, by its end.

    It is a file in memory: the group pays for it, and it does not count when the kernel looks for the largest process.
    """
    before = group.num_kills()
    group.add(os.getpid())
    with open(os.memfd_create("all"), "wb", buffering=0) as taken:
        while group.num_kills() == before:
            taken.write(bytes(_PIECE_BYTES))


if __name__ == "__main__":
    take_all(Group(Path(sys.argv[1]), int(sys.argv[2])))
