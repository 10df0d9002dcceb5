"""What a machine is said to be, read from made-up tools and files."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.machine import inventory, memory
from finetune.machine.memory import MemoryWatch, Pages, pages_of

Tool = Callable[[str, str], Path]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Puts a shell script onto a PATH that has no other program."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))

    def make(name: str, script: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return file

    return make


DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int number(const char *name) { return atoi(getenv(name)); }
int cuInit(unsigned flags) { return number("FAKE_INIT"); }
int cuDeviceGetCount(int *count) { *count = number("FAKE_COUNT"); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 100 + ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { return snprintf(name, size, "GPU of %d", device) < 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)(device - 99) * 85014151168u; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 18 && device == 101; return 0; }
"""


def test_gpus_are_what_the_driver_shows_and_none_where_there_is_no_driver_or_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    real = inventory.version_of
    monkeypatch.setattr(inventory, "version_of", lambda name: "2.13.0" if name == "torch" else real(name))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    def asked() -> list[tuple[str, int | None]]:
        inventory.gpus.cache_clear()
        return inventory.gpus()

    request.addfinalizer(inventory.gpus.cache_clear)
    (tmp_path / "libcuda.so.1").write_text("no library")
    assert asked() == inventory.gpu_memory_bytes() == []
    (tmp_path / "driver.c").write_text(DRIVER)
    command = ["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(tmp_path / "driver.c")]
    subprocess.run(command, check=True)
    for name, value in {"FAKE_INIT": "0", "FAKE_COUNT": "3"}.items():
        monkeypatch.setenv(name, value)
    assert asked() == [("GPU of 100", 85014151168), ("GPU of 101", None), ("GPU of 102", 3 * 85014151168)]
    assert inventory.gpu_memory_bytes() == [85014151168, None, 3 * 85014151168], "one that shares the host's memory"
    monkeypatch.setattr(inventory, "version_of", lambda name: "2.13.0+cpu")
    assert asked() == [], "a torch for CPUs alone does not train on them"
    monkeypatch.setattr(inventory, "version_of", lambda name: "2.13.0")
    monkeypatch.setenv("FAKE_INIT", "100")
    assert asked() == [], "no device"


def test_compilers_are_looked_for_beside_the_interpreter_first(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    assert (inventory.compiler(), inventory.ninja()) == (None, None)
    anywhere, own = tool("ninja", ""), tmp_path / "bin" / "ninja"
    assert inventory.ninja() == str(anywhere)
    tool("bin/ninja", "")
    assert inventory.ninja() == str(own), "pip puts it there, whether the environment is activated or not"
    assert inventory.search_path().split(os.pathsep) == [str(own.parent), str(tmp_path)]
    assert inventory.compiler() is None
    mine = tool("my-c++", "")
    monkeypatch.setenv("CXX", "my-c++")
    assert inventory.compiler() == str(mine)


def test_headers_are_found_where_the_compiler_is_told_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: not str(path).startswith("/usr") and really(path))
    monkeypatch.delenv("CPATH", raising=False)
    assert inventory.libaio() is None
    (tmp_path / "libaio.h").touch()
    monkeypatch.setenv("CPATH", os.pathsep.join(["", str(tmp_path / "no"), str(tmp_path)]))
    assert inventory.libaio() == str(tmp_path / "libaio.h")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert inventory.python_headers() is None
    (tmp_path / "Python.h").touch()
    assert inventory.python_headers() == str(tmp_path / "Python.h")


def test_memory_that_may_be_pinned_is_a_number_or_unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, said in ((8 << 20, 8 << 20), (0, 0), (resource.RLIM_INFINITY, None)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, resource.RLIM_INFINITY))
        assert inventory.memlock_bytes() == said


@pytest.mark.parametrize(
    ("text", "described", "flags"),
    [
        (
            "processor : 0\nmodel name\t: A CPU @ 2 GHz\nflags\t\t: fpu avx2 avx512bw amx_bf16x\n\nmodel name : other\n",
            "A CPU @ 2 GHz (avx2, avx512bw)",
            "flags\t\t: fpu avx2 avx512bw amx_bf16x",
        ),
        ("model name : Plain\nflags : fpu\n", "Plain", "flags : fpu"),
        ("Features : asimd\nmodel name : seen too late\n", os.uname().machine, "Features : asimd"),
    ],
)
def test_a_processor_is_its_name_and_the_vectors_that_matter(
    text: str, described: str, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert inventory.cpu_description() == described
    assert inventory.cpu_flags() == flags


def test_a_system_without_such_files_still_has_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert inventory.cpu_description() == os.uname().machine
    assert isinstance(inventory.cpu_flags(), str)
    assert pages_of(1) is None


def test_a_distribution_has_a_version_or_is_not_there() -> None:
    assert inventory.version_of("no-such-distribution") is None
    assert str(inventory.version_of("torch"))[0].isdigit()


# -- memory of processes


@pytest.mark.parametrize(
    ("text", "pages"),
    [
        (
            "Name:\tx\nVmHWM:\t  900 kB\nVmRSS:\t  700 kB\nRssFile:\t  100 kB\n",
            Pages(own=600 << 10, peak=800 << 10, files=100 << 10),
        ),
        ("Name:\tx\nState:\tZ (zombie)\n", None),
        ("VmHWM:\t\nVmRSS:\t 1 kB\nRssFile:\t 1 kB\n", None),
        ("VmHWM:\tmany kB\nVmRSS:\t 1 kB\nRssFile:\t 1 kB\n", None),
        ("", None),
    ],
)
def test_the_kernel_s_own_account_is_read_or_there_is_none(
    text: str, pages: Pages | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert pages_of(17) == pages


def test_files_that_all_ranks_map_are_counted_once_and_every_peak_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    readings: dict[int, list[Pages | None]] = {
        1: [Pages(own=10, peak=100, files=7), Pages(own=20, peak=90, files=9), None],
        2: [Pages(own=1, peak=50, files=30), None, None],
        3: [None, None, None],
    }
    monkeypatch.setattr(memory, "pages_of", lambda process: readings[process].pop(0))
    watch = MemoryWatch([2, 1, 3])
    assert (watch.peak_bytes, watch.peaks) == (0, []), "nothing could be read yet"
    for _ in range(3):
        watch._look()
    assert watch.peaks == [50, 100], "in the order given, and without what was never there"
    assert watch.peak_bytes == 150 + 30
