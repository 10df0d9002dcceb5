"""CPU kernels that were built ahead, for levels of x86-64 processors, in a folder of this package.

A machine that has them needs no compiler, no writable folder and no time at its first start.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serve.model.kernels.compiler import compile_kernels, digest_of, find_compiler, missing

FOLDER = Path(__file__).with_name("ahead")
"""Where they are looked for. What lies in the package is run as its modules are, whoever wrote it."""


@dataclass(frozen=True, slots=True)
class Level:
    """Processors that have certain instructions."""

    name: str
    flags: tuple[str, ...]
    """What the compiler is told for it."""
    needs: frozenset[str]
    """Words of ``flags`` in /proc/cpuinfo."""


_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
LEVELS = (
    Level("x86-64-v3", ("-march=x86-64-v3",), _V3),
    Level("x86-64-v4", ("-march=x86-64-v4",), _V4),
    # No level of the standard has the products of bytes and of bf16 numbers, by which the kernels of bf16 models multiply where
    # they are. No processor has the latter alone.
    Level("x86-64-v4-vnni", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}),
    Level("x86-64-v4-bf16", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), _V4 | {"avx512_vnni", "avx512_bf16"}),
)
"""From the least to the most; a processor of one has the instructions of all before it."""


@dataclass(frozen=True, slots=True)
class Built:
    """A library in the folder."""

    library: Path
    level: Level
    is_best: bool
    """Whether the processor has nothing that a build of a higher level would use."""


@functools.cache
def processor_words() -> frozenset[str]:
    """What this machine's first processor can do, by /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return frozenset(next((line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features"))), "").split())


def find_built() -> Built | None:
    """The library of the highest level that this processor has, of those that were built from today's sources."""
    runs = [level for level in LEVELS if platform.machine() == "x86_64" and level.needs <= processor_words()]
    there = (level for level in reversed(runs) if _library(level, FOLDER).is_file())
    return next((Built(_library(level, FOLDER), level, level is runs[-1]) for level in there), None)


def build_ahead(names: Sequence[str], folder: Path) -> list[Path]:
    """Compile the kernels for these levels, those of other sources in the folder removed.

    Raises:
        KeyError: a name is none of ``LEVELS``.
        KernelUnavailable: there is no compiler, or it failed.
        OSError: the folder cannot be written.
    """
    levels = [{level.name: level for level in LEVELS}[name] for name in names]
    compiler = find_compiler()
    if compiler is None:
        raise missing()
    folder.mkdir(parents=True, exist_ok=True)
    for level in levels:
        compile_kernels(compiler, level.flags, _library(level, folder))
    current = {_library(level, folder) for level in LEVELS}
    for old in set(folder.glob("cpu-*.so")) - current:
        old.unlink()
    return [_library(level, folder) for level in levels]


def _library(level: Level, folder: Path) -> Path:
    return folder / f"cpu-{level.name}-{digest_of(*level.flags)}.so"
