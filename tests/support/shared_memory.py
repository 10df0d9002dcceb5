"""What lies in /dev/shm: what a test's own processes leave there, and not what those of others have there for now."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")


def in_shared_memory() -> frozenset[str]:
    """The names there."""
    return frozenset(os.listdir(FOLDER))


def abandoned(before: frozenset[str]) -> set[str]:
    """Names that came after ``before``, and that no living process has mapped or open: nobody will remove them."""
    new = in_shared_memory() - before
    if not new:
        return set()
    begin, used = f"{FOLDER}/", set[str]()
    for process in Path("/proc").glob("[0-9]*"):
        used.update(line.split(begin, 1)[1].strip() for line in _lines(process) if begin in line)
    return {name for name in new if name not in used} & in_shared_memory()


def _lines(process: Path) -> list[str]:
    """What a process has mapped and open; of one that has ended, or is not ours to look into, nothing."""
    lines: list[str] = []
    with suppress(OSError):
        for place in (process / "fd").iterdir():
            with suppress(OSError):  # it was closed since
                lines.append(os.readlink(place))
    with suppress(OSError):
        lines += (process / "maps").read_text().splitlines()
    return lines
