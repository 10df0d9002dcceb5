"""DeepSpeed's own C++ operations: built or loaded by name, and its file access timed on a disk. Run as a process of its own."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import deepspeed
import deepspeed.ops
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, PinMemoryBuilder
from deepspeed.ops.op_builder.builder import OpBuilder

from finetune.machine import pages
from finetune.machine.nvme import CANDIDATES, PROBE_BYTES, Disk
from finetune.machine.ops import ASYNC_IO, CPU_ADAM, LOCKING, PAGES, PIN_MEMORY
from finetune.machine.process import die_with_parent

_FILE_CONSTANT = re.compile(r"^(?:static\s+)?const\s+[\w:]+\s+(c_\w+)\s*=", re.MULTILINE)
"""Constants of one source, which another may have by the same name."""


class _Builder(Protocol):
    """What we use of DeepSpeed's ``OpBuilder``."""

    name: str
    sources: Callable[[], list[str]]
    include_paths: Callable[[], list[str]]
    cxx_args: Callable[[], list[str]]

    def load(self, verbose: bool) -> object: ...


class _FileAccess(Protocol):
    """What we use of DeepSpeed's ``aio_handle``: each call returns when all bytes of the tensor have moved."""

    def sync_pwrite(self, data: torch.Tensor, path: str, offset: int) -> object: ...

    def sync_pread(self, data: torch.Tensor, path: str, offset: int) -> object: ...


def build_op(name: str, needed: Sequence[Path] = ()) -> None:
    """Build, or load from the cache, one of DeepSpeed's C++ operations; ``name`` is its builder's NAME.

    Args:
        needed: libraries of operations, named as they are, that this one loads first.
    """
    for library in needed:
        load_op(library.stem, library)
    builders = {CPU_ADAM: CPUAdamBuilder, PIN_MEMORY: PinMemoryBuilder, ASYNC_IO: AsyncIOBuilder}
    builder: _Builder = builders[name]()
    if name in (PIN_MEMORY, ASYNC_IO):
        _build_as_one(builder, before=LOCKING if name == PIN_MEMORY else None)
    builder.load(verbose=True)


def _build_as_one(builder: _Builder, before: Path | None) -> None:
    """Have an operation compiled as one source, without the debugging symbols that nobody reads.

    Args:
        before: a header of ours that its sources come after.
    """
    place = Path(deepspeed.ops.__file__).parent
    folders = [place / path for path in builder.include_paths()]
    copies = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / f"{builder.name}_sources"
    merged = merge_sources([place / path for path in builder.sources()], folders, copies, before)
    arguments = [argument for argument in builder.cxx_args() if argument != "-g"]
    builder.sources = lambda: [str(merged)]
    builder.include_paths = lambda: [str(copies), *map(str, folders)]
    builder.cxx_args = lambda: arguments


def merge_sources(sources: Sequence[Path], include_folders: Sequence[Path], folder: Path, before: Path | None = None) -> Path:
    """Write one source that includes copies of ``sources`` into ``folder``; returns it.

    The copies of headers beside them are included once each; each source's own constants get names of their own.
    ``folder`` must come before ``include_folders`` on the compiler's search path. ``before``: a header included first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for header in (header for place in include_folders for header in place.glob("*.h")):
        (folder / header.name).write_text("#pragma once\n" + header.read_text(encoding="utf-8"), encoding="utf-8")
    lines = [] if before is None else [f'#include "{before}"']
    for source in sources:
        text = source.read_text(encoding="utf-8")
        for name in set(_FILE_CONSTANT.findall(text)):
            text = re.sub(rf"\b{name}\b", f"{name}_of_{source.stem}", text)
        (folder / source.name).write_text(text, encoding="utf-8")
        lines.append(f'#include "{source.name}"')
    merged = folder / "merged.cpp"
    merged.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return merged


def load_all(libraries: Mapping[str, str], *, device: str) -> None:
    """Load what was built for a rank on ``device``: DeepSpeed's operations and, on a CPU, the memory of large tensors."""
    for name, library in libraries.items():
        if name == PAGES:
            if device == "cpu":
                pages.use(Path(library))
        else:
            load_op(name, Path(library))


def load_op(name: str, library: Path) -> None:
    """Load a built operation as DeepSpeed will ask for it: without a compiler, a lock or a look at its sources."""
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None, f"{library} is not an extension module"
    assert spec.loader is not None, f"{library} is not an extension module"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # file access finds the symbols of pinned memory this way
    OpBuilder._loaded_ops[name] = module


def measure_disk(folder: Path, libraries: Sequence[Path]) -> Disk:
    """Try ``nvme.CANDIDATES`` with DeepSpeed's own file access; the one with the best read and write together."""
    for library in libraries:
        load_op(library.stem, library)
    access = AsyncIOBuilder().load().aio_handle
    data = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
    probe = folder / f"probe-{os.getpid()}"
    found: list[Disk] = []
    try:
        for block, depth, threads in CANDIDATES:
            handle: _FileAccess = access(block, depth, False, True, threads)
            seconds = []
            for act in (handle.sync_pwrite, handle.sync_pread):
                began = time.perf_counter()
                act(data, str(probe), 0)
                seconds.append(time.perf_counter() - began)
            write, read = (PROBE_BYTES / 2**30 / second for second in seconds)
            found.append(Disk(block_bytes=block, queue_depth=depth, threads=threads, read_gib_s=read, write_gib_s=write))
    finally:
        probe.unlink(missing_ok=True)
    return min(found, key=lambda disk: 1 / disk.read_gib_s + 1 / disk.write_gib_s)


if __name__ == "__main__":
    die_with_parent(int(os.environ["TESSERA_PARENT"]))
    if sys.argv[1] == "measure-disk":
        print(json.dumps(asdict(measure_disk(Path(sys.argv[2]), [Path(library) for library in sys.argv[3:]]))))
    else:
        build_op(sys.argv[1], [Path(library) for library in sys.argv[2:]])
