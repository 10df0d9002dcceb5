"""Limits of containers, read from made-up folders that look like the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from host import limits

GIB = 1 << 30
NONE_V1 = str((1 << 63) - 4096)


class Tree:
    """A made-up /proc/self and the control groups it speaks of."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc self"
        self.proc.mkdir(parents=True)
        self._root = root
        self._groups: list[str] = []
        self._mounts = ["23 1 0:5 / /sys rw - sysfs sysfs rw"]
        self._write()

    def hierarchy(self, kind: str, controllers: str, path: str, *, root: str = "/") -> Path:
        """Mount one and put the process into its group ``path``; returns the mount point."""
        point = self._root / f"{kind} {controllers}"
        point.mkdir()
        escaped = str(point).replace(" ", "\\040")
        options = f"rw,{controllers}" if kind == "cgroup" else "rw,nsdelegate"
        self._mounts.append(f"30 23 0:30 {root} {escaped} rw,nosuid shared:9 - {kind} {kind} {options}")
        number = len(self._groups) + 1
        self._groups.append(f"{0 if kind == 'cgroup2' else number}:{controllers if kind == 'cgroup' else ''}:{path}")
        self._write()
        return point

    def _write(self) -> None:
        (self.proc / "cgroup").write_text("".join(line + "\n" for line in self._groups))
        (self.proc / "mountinfo").write_text("".join(line + "\n" for line in self._mounts))


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_without_groups_there_is_no_limit(tree: Tree) -> None:
    assert limits.memory_limit(tree.proc) is None
    assert limits.memory_total(tree.proc) == psutil.virtual_memory().total
    assert limits.usable_cores(tree.proc) == len(os.sched_getaffinity(0))
    assert limits.memory_kills(tree.proc) is None
    assert limits.memory_limit(tree.proc / "nowhere") is None


def test_version_2_takes_the_tightest_of_the_group_and_its_parents(tree: Tree) -> None:
    top = tree.hierarchy("cgroup2", "", "/slice/pod/container")
    put(top / "slice/pod/container", memory__max="max", cpu__max="max 100000")
    put(top / "slice/pod", memory__max=str(2 * GIB), cpu__max="100000 100000", memory__current=str(GIB))
    put(top / "slice", memory__max=str(3 * GIB), cpu__max="400000 100000", memory__current=str(GIB))
    assert limits.memory_limit(tree.proc) == limits.memory_total(tree.proc) == 2 * GIB
    assert limits.usable_cores(tree.proc) == 1
    assert limits.memory_available(tree.proc) <= GIB
    put(top / "slice", memory__max=str(GIB // 2))
    assert limits.memory_limit(tree.proc) == GIB // 2
    assert limits.memory_available(tree.proc) == 0, "an ancestor is full"


def test_version_1_takes_the_tightest_of_the_group_and_its_parents(tree: Tree) -> None:
    memory, cpu = tree.hierarchy("cgroup", "memory", "/docker/abc"), tree.hierarchy("cgroup", "cpu,cpuacct", "/docker/abc")
    put(memory / "docker/abc", memory__limit_in_bytes=NONE_V1, memory__usage_in_bytes=str(GIB))
    put(memory / "docker", memory__limit_in_bytes=str(2 * GIB), memory__usage_in_bytes=str(GIB), memory__stat="cache 1")
    put(cpu / "docker/abc", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    put(cpu / "docker", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    assert limits.memory_limit(tree.proc) == 2 * GIB
    assert limits.memory_available(tree.proc) <= GIB
    assert limits.usable_cores(tree.proc) == 1


def test_a_container_sees_what_is_mounted_for_it(tree: Tree) -> None:
    """Without a namespace of its own the path in /proc is the host's, and the mount shows one group of it."""
    memory = tree.hierarchy("cgroup", "memory", "/docker/abc", root="/docker/abc")
    put(memory, memory__limit_in_bytes=str(GIB), memory__stat=f"total_inactive_file 5\nhierarchical_memory_limit {GIB // 2}")
    assert limits.memory_limit(tree.proc) == GIB // 2, "what a group outside allows"


@pytest.mark.parametrize("path", ["/", "/../other", "/elsewhere/that/is/not/shown"])
def test_a_group_that_is_not_shown_is_what_the_mount_shows(tree: Tree, path: str) -> None:
    put(tree.hierarchy("cgroup2", "", path), memory__max=str(GIB))
    assert limits.memory_limit(tree.proc) == GIB


def test_both_versions_side_by_side_are_both_read(tree: Tree) -> None:
    put(tree.hierarchy("cgroup2", "", "/"), cpu__max="100000 100000")
    put(tree.hierarchy("cgroup", "memory", "/"), memory__limit_in_bytes=str(GIB))
    assert (limits.memory_limit(tree.proc), limits.usable_cores(tree.proc)) == (GIB, 1)


@pytest.mark.parametrize("text", ["max", "", "-1", "0", "many", NONE_V1, str(1 << 70), str(1 << 59), "a b"])
def test_what_limits_nothing_is_no_limit(tree: Tree, text: str) -> None:
    put(tree.hierarchy("cgroup2", "", "/a") / "a", memory__max=text, cpu__max=text)
    put(tree.hierarchy("cgroup", "memory", "/a") / "a", memory__limit_in_bytes=text)
    assert limits.memory_limit(tree.proc) is None
    assert limits.usable_cores(tree.proc) == len(os.sched_getaffinity(0))
    assert limits.memory_available(tree.proc) > 0


def test_a_quota_below_one_core_is_one_core(tree: Tree) -> None:
    put(tree.hierarchy("cgroup2", "", "/"), cpu__max="20000 100000")
    assert limits.usable_cores(tree.proc) == 1


def test_cached_files_count_as_free(tree: Tree) -> None:
    top = tree.hierarchy("cgroup2", "", "/")
    stat = f"anon 1\ninactive_file {GIB // 2}\nactive_file {GIB // 4}\nbroken line here\n"
    put(top, memory__max=str(GIB), memory__current=str(GIB), memory__stat=stat)
    assert limits.memory_available(tree.proc) == min(GIB * 3 // 4, psutil.virtual_memory().available)
    put(top, memory__current=str(4 * GIB))
    assert limits.memory_available(tree.proc) == 0


@pytest.mark.parametrize(("kind", "file"), [("cgroup2", "memory__events"), ("cgroup", "memory__oom_control")])
def test_a_kill_for_memory_is_told_from_any_other(tree: Tree, kind: str, file: str) -> None:
    group = tree.hierarchy(kind, "memory" if kind == "cgroup" else "", "/a") / "a"
    put(group, **{file: "under_oom 0\noom_kill 2"}, memory__max=str(2 * GIB), memory__limit_in_bytes=str(2 * GIB))
    before = limits.memory_kills(tree.proc)
    assert before == 2
    assert limits.killed_for_memory(before, tree.proc) is None
    put(group, **{file: "under_oom 0\noom_kill 3"})
    said = limits.killed_for_memory(before, tree.proc)
    assert said == "killed by the kernel for memory: the container's limit is 2.0 GiB"
    assert limits.killed_for_memory(None, tree.proc) is None
