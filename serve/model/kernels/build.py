"""Compiles the CPU kernels once per machine and loads them.

Plain C++ behind a C interface, without torch's headers: building takes seconds, not half a minute. The file is linked
against OpenMP's standard name, which in a process that has imported torch is torch's own copy: one thread pool, not two.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

_SOURCES = tuple(
    Path(__file__).with_name(name) for name in ("attention.cpp", "group.cpp", "linear.cpp", "quantized.cpp", "sampling.cpp")
)
_HEADERS = tuple(Path(__file__).with_name(name) for name in ("products.h", "vectors.h"))
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fopenmp",
    # Not -ffast-math: it would assume NaN away and, in a shared library, switch the whole process to flush denormals.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-Wno-psabi",
)
_VERSION = 7
_COMPILERS = ("c++", "g++", "clang++")
_SCRATCH = "building-"
_YOUNG_SECONDS = 60.0
_ADVICE = "set TESSERA_CACHE_DIR (--cache-dir) to a folder of this user's own that can be written"


class KernelUnavailable(Exception):
    """The kernels cannot be built or loaded here; the message says why. Callers use the torch route instead."""


@cache
def load_cpu_kernels(cache_dir: str = "") -> ctypes.CDLL:
    """The compiled kernels; built on the first call of the first process, loaded from the cache afterwards.

    Args:
        cache_dir: ``kernels.cache_dir``. A cache that holds the kernels already need not be writable.

    Raises:
        KernelUnavailable: no compiler, the compiler failed, or the cache is no place to keep a build or load one from.
    """
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    folder = _kernel_folder(cache_dir)
    library = folder / f"cpu-{_fingerprint(compiler)}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_owner(folder)
        _clear_leftovers(folder)
        if not library.exists():
            if compiler is None:
                raise KernelUnavailable(f"no C++ compiler ({', '.join(_COMPILERS)}) on the PATH")
            _compile(compiler, library)
    except OSError as error:
        raise KernelUnavailable(f"{folder} cannot hold the compiled kernels ({error.strerror or error}); {_ADVICE}") from error
    try:
        kernels = ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelUnavailable(f"{library} does not load ({error}); {_ADVICE}, on a file system without noexec") from error
    if kernels.tessera_kernel_version() != _VERSION:
        raise KernelUnavailable(f"{library} is of another version")
    return kernels


def _kernel_folder(cache_dir: str) -> Path:
    try:
        cache = Path(cache_dir or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "tessera")).expanduser()
    except RuntimeError as error:  # a user without an entry in the password file, and no HOME
        raise KernelUnavailable(f"this user has no home folder to keep the compiled kernels in; {_ADVICE}") from error
    return cache / "kernels"


def _check_owner(folder: Path) -> None:
    owner = folder.stat()
    if owner.st_uid not in (os.getuid(), 0) or owner.st_mode & 0o022:
        raise KernelUnavailable(f"{folder} can be written by other users, code is not loaded from there; {_ADVICE}")


def _fingerprint(compiler: str | None) -> str:
    """Names a build by everything that decides it: source, flags, compiler, and the instructions of this processor."""
    digest = hashlib.sha256()
    for source in (*_SOURCES, *_HEADERS):
        digest.update(source.read_bytes())
    digest.update(" ".join(_FLAGS).encode())
    digest.update((compiler or "none").encode())
    digest.update(platform.machine().encode())
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        features = next((line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
        digest.update(features.encode())
    return digest.hexdigest()[:16]


def _clear_leftovers(folder: Path) -> None:
    """Remove what builds that were killed have left. One that goes on holds a lock; one that has just begun may not yet."""
    for scratch in folder.glob(_SCRATCH + "*"):
        with contextlib.suppress(OSError):
            if time.time() - scratch.stat().st_mtime > _YOUNG_SECONDS:
                with _locked(scratch):
                    shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
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


def _compile(compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=library.parent) as scratch, _locked(Path(scratch)):
        built = Path(scratch) / library.name
        command = [compiler, *_FLAGS, *map(str, _SOURCES), "-o", str(built)]
        log.info("building the CPU kernels (a few seconds, once; kept in %s)", library.parent)
        try:
            # The compiler's own files go there too: the system may have no folder for temporary ones that can be written.
            environment = {**os.environ, "TMPDIR": scratch}
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelUnavailable(f"{compiler} could not run: {error}") from error
        if done.returncode != 0:
            raise KernelUnavailable(f"{compiler} failed: {done.stderr.strip()[-500:]}")
        built.replace(library)
