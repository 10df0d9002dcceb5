"""Libraries in C++ that runs load: whether they can be built, built once per environment, announced before it takes time.

Each is built by one process, under a lock, in a folder of its own that is renamed when it is whole: a build that is
killed leaves nothing that a later run would wait for or load.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from finetune.machine import inventory, pages
from host.modules import import_path, module_command

Say = Callable[[str], None]
CPU_ADAM = "cpu_adam"
PIN_MEMORY = "pin_memory"
ASYNC_IO = "async_io"
"""Reads and writes a disk past the page cache; finds its pinned buffers through ``pin_memory``, which is loaded before it."""
PAGES = "pages"
"""The memory of large tensors on a CPU, which is Tessera's own (``pages``); the others are DeepSpeed's."""
LOCKING: Final = Path(__file__).with_name("lock_if_allowed.h")
"""What ``pin_memory`` is built with beside DeepSpeed's sources."""
_NAMES = {
    CPU_ADAM: "DeepSpeed's CPU Adam for the offloaded optimizer",
    PIN_MEMORY: "DeepSpeed's pinned memory for the buffers of NVMe offload",
    ASYNC_IO: "DeepSpeed's asynchronous file access for NVMe offload",
    PAGES: "the memory of large tensors on the CPU",
}
_ABOUT = "about 20 to 60 s"
_ADVICE = "set TESSERA_CACHE_DIR to a folder that can be written"
_BUILD_LIMIT_SECONDS = 1200


def cache_folder() -> Path:
    """Where is kept what is made or measured once per machine.

    Raises:
        RuntimeError: nothing is set, and this user has no home folder.
    """
    own = os.environ.get("TESSERA_CACHE_DIR")
    return Path(own).expanduser() if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera"


def extensions_folder() -> Path:
    """Where built operations are kept: per versions and processor, since neither torch nor DeepSpeed looks at them.

    Operations are cached under their name alone, so another DeepSpeed would overwrite them with ones that do not fit.

    Raises:
        RuntimeError: nothing is set, and this user has no home folder.
    """
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given:
        return Path(given)
    processor = hashlib.sha256(inventory.cpu_flags().encode()).hexdigest()[:8]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    versions = f"torch{inventory.version_of('torch')}-deepspeed{inventory.version_of('deepspeed')}"
    return cache_folder() / "torch_extensions" / f"{versions}-{python}-{platform.machine()}-{processor}"


def library_of(op: str) -> Path:
    """The shared library of a built operation."""
    folder = op
    if op == PAGES:
        folder = pages.build_name()
    elif op == PIN_MEMORY:  # in part Tessera's own, which versions of others do not tell
        folder = f"{op}-{hashlib.sha256(LOCKING.read_bytes()).hexdigest()[:12]}"
    return extensions_folder() / folder / f"{op}.so"


@dataclass(frozen=True, slots=True)
class Built:
    """Whether an operation can be loaded."""

    available: bool
    reason: str
    """Why not; empty if it is."""


def ensure(op: str, say: Say) -> Built:
    """Find or build an operation; a build is announced with what it is and about how long it takes."""
    try:
        library_of(op)
    except RuntimeError:
        return Built(False, f"this user has no home folder to keep {_NAMES[op]} in; {_ADVICE}")
    if library_of(op).is_file():
        if inventory.compiler() is None:
            say(f"no C++ compiler found; using {_NAMES[op]} as built before ({library_of(op).parent})")
        return Built(True, "")
    missing = [
        what
        for what, found in (
            ("no C++ compiler", inventory.compiler()),
            ("no ninja", inventory.ninja()),
            ("no Python.h", inventory.python_headers()),
        )[: 1 if op == PAGES else None]
        if found is None
    ]
    if missing:
        return Built(False, f"{' and '.join(missing)} found to build {_NAMES[op]}")
    return _build(op, say)


def _build(op: str, say: Say) -> Built:
    folder = extensions_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        return Built(False, f"{folder} cannot hold {_NAMES[op]} ({error.strerror or error}); {_ADVICE}")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library_of(op).is_file():  # another run built it while this one waited
            return Built(True, "")
        if op != PAGES:  # which takes a second
            say(f"building {_NAMES[op]} with {inventory.compiler()}: {_ABOUT}, once; kept in {folder}")
        began = time.monotonic()
        failure = _run_build(op, folder)
        if failure is None:
            if op != PAGES:
                say(f"built in {time.monotonic() - began:.0f} s")
            return Built(True, "")
        return Built(False, f"{_NAMES[op]} could not be built ({failure})")


def _build_command(op: str, folder: Path) -> list[str]:
    """What builds ``op`` as a file of its name, in a folder of its name below ``folder``."""
    if op != PAGES:
        needed = [str(library_of(PIN_MEMORY))] if op == ASYNC_IO else []
        return [*module_command("finetune.machine.build_ops"), op, *needed]
    compiler = inventory.compiler()
    assert compiler is not None, "nothing is built without one"
    (folder / op).mkdir()
    return pages.build_command(compiler, folder / op / f"{op}.so")


def _run_build(op: str, folder: Path) -> str | None:
    """Build ``op`` into ``folder``; return why it failed."""
    work = folder / f"building-{os.getpid()}"
    log = folder / f"{op}.log"
    shutil.rmtree(work, ignore_errors=True)
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(work), "PATH": inventory.search_path(), "DS_ACCELERATOR": "cpu"}
    environment |= {"TESSERA_PARENT": str(os.getpid()), "PYTHONPATH": import_path(os.environ)}
    # The compiler's own files go there too: the system may have no folder for temporary ones that can be written.
    environment["TMPDIR"] = str(work)
    try:
        work.mkdir()
        with log.open("wb") as out:
            subprocess.run(
                _build_command(op, work),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                check=True,
                timeout=_BUILD_LIMIT_SECONDS,
            )
        (work / op).rename(library_of(op).parent)
    except (OSError, subprocess.SubprocessError) as error:
        last = log.read_text(errors="replace").strip().splitlines()[-1:] if log.is_file() else []
        return f"{last[0] if last else error}; all of it in {log}"
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return None
