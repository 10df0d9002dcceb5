"""What lies in /dev/shm: what a test's own processes leave there, and not what those of others have there for now."""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = Path("/dev/shm")


def in_shared_memory() -> frozenset[str]:
    """The names there."""
    return frozenset(os.listdir(_FOLDER))


def abandoned(before: frozenset[str]) -> set[str]:
    """Names that came after ``before``, and that no living process has mapped or open: nobody will remove them."""
    new = in_shared_memory() - before
    if not new:
        return set()
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            used.update(line.split("/dev/shm/", 1)[1].strip() for line in _lines(process) if "/dev/shm/" in line)
        except OSError:  # it has ended, or is not ours to look into
            continue
    return {name for name in new if name not in used} & in_shared_memory()


def _lines(process: Path) -> list[str]:
    opened = [os.readlink(place) for place in (process / "fd").iterdir() if place.is_symlink()]
    return (process / "maps").read_text().splitlines() + opened
