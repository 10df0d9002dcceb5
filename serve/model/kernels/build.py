"""Loads the CPU kernels: built ahead for processors of this kind, or compiled once per machine.

Plain C++ behind a C interface, without torch's headers: building takes seconds, not half a minute. The file is linked
against OpenMP's standard name, which in a process that has imported torch is torch's own copy: one thread pool, not two.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import shutil
import time
from functools import cache
from pathlib import Path

from serve.model.kernels import ahead
from serve.model.kernels.compiler import (
    SCRATCH,
    VERSION,
    KernelUnavailable,
    compile_kernels,
    digest_of,
    find_compiler,
    locked,
    missing,
)

log = logging.getLogger(__name__)

NATIVE = "native"
"""What kernels were built for that this machine has compiled for itself."""
_NATIVE_FLAGS = ("-march=native",)
_YOUNG_SECONDS = 60.0
_ADVICE = "set TESSERA_CACHE_DIR (--cache-dir) to a folder of this user's own that can be written"


@cache
def load_cpu_kernels(cache_dir: str = "") -> ctypes.CDLL:
    """The compiled kernels. Those built ahead, where they use all that this processor has; else those of this machine's own,
    built on the first call of the first process, loaded from the cache afterwards; else the best that were built ahead.

    Args:
        cache_dir: ``kernels.cache_dir``. A cache that holds the kernels already need not be writable.

    Raises:
        KernelUnavailable: none were built ahead for such a processor, and there is no compiler, the compiler failed, or the
            cache is no place to keep a build or load one from.
    """
    built = ahead.find_built()
    if built is not None and built.is_best:
        return _opened(built.library)
    try:
        return _opened(_compiled_here(cache_dir))
    except KernelUnavailable as reason:
        if built is None:
            raise
        log.info(
            "kernels built ahead for %s serve, which leaves instructions of this processor unused: %s", built.level.name, reason
        )
        return _opened(built.library)


def built_for(kernels: ctypes.CDLL | None) -> str:
    """What the kernels were built for: a level of processors, ``native`` for this machine alone, ``none`` without kernels."""
    if kernels is None:
        return "none"
    return next((level.name for level in reversed(ahead.LEVELS) if f"cpu-{level.name}-" in Path(kernels._name).name), NATIVE)


def _opened(library: Path) -> ctypes.CDLL:
    try:
        kernels = ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelUnavailable(f"{library} does not load ({error}); {_ADVICE}, on a file system without noexec") from error
    if kernels.tessera_kernel_version() != VERSION:
        raise KernelUnavailable(f"{library} is of another version")
    return kernels


def _compiled_here(cache_dir: str) -> Path:
    """The library in the cache, compiled if it is not there yet."""
    compiler = find_compiler()
    folder = _kernel_folder(cache_dir)
    library = folder / f"cpu-{_fingerprint(compiler)}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_owner(folder)
        _clear_leftovers(folder)
        if not library.exists():
            if compiler is None:
                raise missing()
            compile_kernels(compiler, _NATIVE_FLAGS, library)
    except OSError as error:
        raise KernelUnavailable(f"{folder} cannot hold the compiled kernels ({error.strerror or error}); {_ADVICE}") from error
    return library


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
    return digest_of(*_NATIVE_FLAGS, compiler or "none", platform.machine(), *sorted(ahead.processor_words()))


def _clear_leftovers(folder: Path) -> None:
    """Remove what builds that were killed have left. One that goes on holds a lock; one that has just begun may not yet."""
    for scratch in folder.glob(SCRATCH + "*"):
        with contextlib.suppress(OSError):
            if time.time() - scratch.stat().st_mtime > _YOUNG_SECONDS:
                with locked(scratch):
                    shutil.rmtree(scratch, ignore_errors=True)
