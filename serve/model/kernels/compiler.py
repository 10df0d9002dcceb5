"""Runs the compiler over the sources of the CPU kernels."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from host.limits import memory_available, usable_cores

log = logging.getLogger(__name__)

VERSION = 20
"""What a library of these sources answers when it is asked for its version."""
SCRATCH = "building-"
"""How the folder of a build that is going on begins, beside the library that it makes."""

_SOURCES = tuple(
    Path(__file__).with_name(f"{name}.cpp")  # those that take longest first
    for name in (
        "attention_int8", "attention_bf16", "attention_fp32", "quantized", "rounded", "sampling", "linear", "steps",
        "likeliest", "group", "attention",
    )
)  # fmt: skip
_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-falign-loops=64",  # see part_times_rows in avx2.h
    # Not -ffast-math: it would assume NaN away and, in a shared library, switch the whole process to flush denormals.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-Wno-psabi",
)
_COMPILER_BYTES = 512 << 20
"""Memory that is to be there for each file that is compiled beside others; the largest takes half of it."""
_COMPILERS = ("c++", "g++", "clang++")


class KernelUnavailable(Exception):
    """The kernels cannot be built or loaded here; the message says why. Callers use the torch route instead."""


def find_compiler() -> str | None:
    """The path of the first C++ compiler on the PATH."""
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)


def missing() -> KernelUnavailable:
    """What there is to say where no compiler is found."""
    return KernelUnavailable(f"no C++ compiler ({', '.join(_COMPILERS)}) on the PATH")


def digest_of(*decides: str) -> str:
    """Names a build by everything that decides it: the sources, the flags, and what is given here."""
    digest = hashlib.sha256()
    for source in (*_SOURCES, *_HEADERS):
        digest.update(source.read_bytes())
    digest.update(" ".join((*_FLAGS, *decides)).encode())
    return digest.hexdigest()[:16]


def compile_kernels(compiler: str, processor: tuple[str, ...], library: Path) -> None:
    """Build a library, which is there whole or not at all; as many files side by side as there are cores and memory for.

    Args:
        compiler: its path.
        processor: flags that say which instructions it may use.
        library: where it goes; the folder exists.

    Raises:
        KernelUnavailable: the compiler failed.
        OSError: the folder cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=library.parent) as scratch, locked(Path(scratch)):
        built = Path(scratch) / library.name
        log.info("building the CPU kernels (some seconds, once; kept in %s)", library.parent)

        def object_of(source: Path) -> str:
            made = str(Path(scratch) / f"{source.stem}.o")
            _run([compiler, *_FLAGS, *processor, "-c", str(source), "-o", made], scratch)
            return made

        with ThreadPoolExecutor(_side_by_side()) as pool:
            objects = list(pool.map(object_of, _SOURCES))
        _run([compiler, *_FLAGS, *processor, "-shared", *objects, "-o", str(built)], scratch)
        built.replace(library)


def _side_by_side() -> int:
    """How many files are compiled at once: beside a model that is loaded, memory may be short."""
    return max(1, min(usable_cores(), memory_available() // _COMPILER_BYTES))


def _run(command: list[str], scratch: str) -> None:
    """Have the compiler do something; its own files go to ``scratch``, as the system may have no place for them.

    Raises:
        KernelUnavailable: it failed.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "TMPDIR": scratch})
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"{command[0]} could not run: {error}") from error
    if done.returncode != 0:
        raise KernelUnavailable(f"{command[0]} failed: {done.stderr.strip()[-500:]}")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, which ends with this process.

    Raises:
        OSError: another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
