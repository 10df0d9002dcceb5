"""Memory and processors this process may use: the machine's, cut by every control group it is in, of version 1 or 2."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import psutil

_PROC: Final = Path("/proc/self")
_NO_LIMIT: Final = 1 << 60
"""Version 1 writes a number near 2^63 where there is no limit."""


@dataclass(frozen=True, slots=True)
class _Group:
    """One control group: a folder of files."""

    folder: Path
    version: int

    def number(self, name: str) -> int | None:
        """A file that holds one number; ``None`` for none, for ``max``, and for what is no amount of anything."""
        value = _whole(self.text(name))
        return value if value is not None and 0 < value < _NO_LIMIT else None

    def text(self, name: str) -> str:
        try:
            return (self.folder / name).read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            return ""

    def rows(self, name: str) -> dict[str, int]:
        """A file of lines with a name and a number each."""
        words = (line.split() for line in self.text(name).splitlines())
        return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and _whole(pair[1]) is not None}


def usable_cores(proc: Path = _PROC) -> int:
    """Whole cores this process may use: its affinity, cut by the tightest quota of its groups; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups("cpu", proc):
        if group.version == 2:
            quota, _, period = group.text("cpu.max").partition(" ")
        else:
            quota, period = group.text("cpu.cfs_quota_us"), group.text("cpu.cfs_period_us")
        share, length = _whole(quota), _whole(period)
        if share is not None and length is not None and share > 0 and length > 0:
            cores = min(cores, max(1, share // length))
    return cores


def memory_limit(proc: Path = _PROC) -> int | None:
    """Bytes that the tightest of the groups allows; ``None`` where there is no limit, or none below what the machine has."""
    limits = [limit for _, limit in _limited(proc)]
    lowest = min(limits, default=None)
    return lowest if lowest is not None and lowest < psutil.virtual_memory().total else None


def memory_total(proc: Path = _PROC) -> int:
    """Bytes of memory this process may have at most: the machine's, cut by its groups."""
    return memory_limit(proc) or int(psutil.virtual_memory().total)


def memory_available(proc: Path = _PROC) -> int:
    """Bytes that can be had without taking them from others: the system's figure, cut by what each group has left.

    Cached files count as free: the kernel gives them back first.
    """
    available = int(psutil.virtual_memory().available)
    for group, limit in _limited(proc):
        rows = group.rows("memory.stat")
        if group.version == 2:
            used, cached = group.number("memory.current"), ("inactive_file", "active_file")
        else:
            used, cached = group.number("memory.usage_in_bytes"), ("total_inactive_file", "total_active_file")
        if used is not None:
            held = used - sum(rows.get(name, 0) for name in cached)
            available = min(available, max(0, limit - max(0, held)))
    return available


def memory_kills(proc: Path = _PROC) -> int | None:
    """How many processes of this one's group the kernel has killed for memory so far; ``None`` where it does not say."""
    for group in _groups("memory", proc):
        counts = group.rows("memory.events" if group.version == 2 else "memory.oom_control")
        if "oom_kill" in counts:
            return counts["oom_kill"]  # of the innermost group: version 1 counts there alone, version 2 what is below it too
    return None


def killed_for_memory(kills_before: int | None, proc: Path = _PROC) -> str | None:
    """In words, that the kernel has killed a process of this group for memory since ``memory_kills`` said ``kills_before``."""
    kills = memory_kills(proc)
    if kills is None or kills_before is None or kills <= kills_before:
        return None
    limit = memory_limit(proc)
    return "killed by the kernel for memory" + (f": the container's limit is {limit / (1 << 30):.1f} GiB" if limit else "")


def _limited(proc: Path) -> Iterator[tuple[_Group, int]]:
    """The groups that limit memory, and to how many bytes."""
    for group in _groups("memory", proc):
        limit = group.number("memory.max" if group.version == 2 else "memory.limit_in_bytes")
        if limit is not None:
            yield group, limit
        if group.version == 1:  # also what groups outside the container allow, which show no folder here
            above = group.rows("memory.stat").get("hierarchical_memory_limit", 0)
            if 0 < above < (limit or _NO_LIMIT):
                yield group, above


def _groups(controller: str, proc: Path) -> Iterator[_Group]:
    """This process's groups of a controller, the innermost first, then its parents up to what is mounted; both versions."""
    paths = dict(_memberships(proc))
    for mount in _mounts(proc):
        version = 2 if mount.kind == "cgroup2" else 1
        if version == 1 and controller not in mount.controllers:
            continue
        path = paths.get("" if version == 2 else controller)
        if path is None:
            continue
        top = Path(mount.point)
        try:
            inside = PurePosixPath(path).relative_to(mount.root)
        except ValueError:  # seen from another namespace than it was mounted in: the mount is what there is
            inside = PurePosixPath()
        folder = top if ".." in inside.parts else top / inside
        while True:
            if folder.is_dir():
                yield _Group(folder, version)
            if folder == top:
                break
            folder = folder.parent


def _memberships(proc: Path) -> Iterator[tuple[str, str]]:
    """(controller, path) of each hierarchy this process is in; version 2 has no name."""
    for line in _lines(proc / "cgroup"):
        _, found, rest = line.partition(":")
        controllers, found, path = rest.partition(":")
        if found:
            yield from ((name, path) for name in controllers.split(","))


@dataclass(frozen=True, slots=True)
class _Mount:
    """One mounted hierarchy."""

    root: str
    """The group that the mount point shows."""
    point: str
    kind: str
    controllers: tuple[str, ...]


def _mounts(proc: Path) -> Iterator[_Mount]:
    for line in _lines(proc / "mountinfo"):
        first, _, second = line.partition(" - ")
        left, right = first.split(), second.split()
        if len(left) >= 5 and len(right) >= 3 and right[0] in ("cgroup", "cgroup2"):
            yield _Mount(_plain(left[3]), _plain(left[4]), right[0], tuple(right[2].split(",")))


def _plain(path: str) -> str:
    r"""Without the kernel's escapes: a space is written ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
