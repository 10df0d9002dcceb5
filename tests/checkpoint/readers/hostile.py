"""Changes single bytes of a checkpoint's headers, tables and settings, and looks at what opening it then does.

What lies between the tensors' own bytes, in every file of the folder, counts as a table. A changed checkpoint is refused, or
opens as what it was; meanwhile nothing is run, no file outside the folder is opened, and memory and time stay bounded.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from checkpoint import CheckpointError, Given, open_checkpoint, open_structure
from checkpoint.given import NOTHING_GIVEN

MOST_SECONDS = 3.0
MOST_BYTES = 256 << 20
_FORBIDDEN = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.", "pickle.find_class", "ctypes.")


@dataclass(frozen=True, slots=True)
class Target:
    """A good checkpoint."""

    path: Path
    """What is opened."""
    given: Given = NOTHING_GIVEN
    spared: tuple[str, ...] = ()
    """Ends of the names of files in which a change is a change of the model, which nothing tells from another model's."""


@dataclass(slots=True)
class _Watch:
    """What the process did while it was looked at. An audit hook stays for ever, so that there is one, which can be idle."""

    root: str | None = None
    seen: list[str] = field(default_factory=list)
    hooked: bool = False

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.root is None:
            return
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.abspath(os.fsdecode(arguments[0]))
            if not path.startswith(self.root) and not path.endswith((".py", ".pyc")):
                self.seen.append(f"open {path}")
        elif event.startswith(_FORBIDDEN):
            self.seen.append(f"{event} {arguments!r}")
        elif event == "exec" and not getattr(arguments[0], "co_filename", "").endswith(".py"):
            self.seen.append(f"exec {arguments[0]!r}")


_WATCH = _Watch()


@contextmanager
def nothing_reached(root: Path) -> Iterator[None]:
    """Nothing is run and no file outside ``root`` is opened inside this context; what Python imports does not count."""
    if not _WATCH.hooked:
        sys.addaudithook(_WATCH.hook)
        _WATCH.hooked = True
    _WATCH.seen.clear()
    _WATCH.root = str(root.resolve())
    try:
        yield
    finally:
        _WATCH.root = None
    assert not _WATCH.seen, _WATCH.seen


Tensors = dict[str, torch.Tensor]


def read_all(target: Target) -> Tensors:
    with open_checkpoint(target.path, given=target.given) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.tensors}


def tables(root: Path, target: Target) -> list[tuple[Path, list[range]]]:
    """The files below ``root``, and the bytes of each that belong to no tensor."""
    held: dict[Path, list[tuple[int, int]]] = {}
    with open_structure(target.path, given=target.given) as structure:
        paths = {name: Path(os.readlink(f"/proc/self/fd/{fd}")) for name, fd in structure.weights.files.items()}
        for stored in structure.weights.places.values():
            parts = [stored] if stored.added is None else [stored, stored.added.left, stored.added.right]
            for piece in (piece for part in parts for piece in part.pieces):
                extent = piece.extent
                last = sum((n - 1) * step for n, step in zip(extent.shape, extent.strides, strict=True))
                end = extent.offset_bytes + (last + 1) * extent.item_bytes
                held.setdefault(paths[piece.file], []).append((extent.offset_bytes, end))
    found: list[tuple[Path, list[range]]] = []
    for path in sorted(path.resolve() for path in root.rglob("*") if path.is_file()):
        reached, free = 0, []
        for begin, end in [*sorted(held.get(path, [])), (path.stat().st_size,) * 2]:
            free += [range(reached, begin)] if begin > reached else []
            reached = max(reached, end)
        if free and not path.name.endswith(target.spared or ("\0",)):
            found.append((path, free))
    return found


def flip_all(root: Path, target: Target, count: int, seed: int) -> Counter[str]:
    """Change one byte ``count`` times, each alone, and say how often that was refused and how often it did no harm.

    Raises:
        AssertionError: a tensor came out otherwise than it was, by file, byte and both values; or a bound was passed.
    """
    want = read_all(target)
    shapes = {name: tuple(tensor.shape) for name, tensor in want.items() if tensor.is_floating_point()}
    places, draw, ends = tables(root, target), random.Random(seed), Counter[str]()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        path, free = draw.choice(places)
        part = draw.choices(free, [len(part) for part in free])[0]
        byte, mask = draw.choice(part), draw.randrange(1, 256)
        with open(path, "r+b", buffering=0) as file:
            (before,) = os.pread(file.fileno(), 1, byte)
            os.pwrite(file.fileno(), bytes([before ^ mask]), byte)
            begun = time.thread_time()
            try:
                with nothing_reached(root):
                    end = _opened(target, want, shapes)
            finally:
                os.pwrite(file.fileno(), bytes([before]), byte)
        told = f"{path.relative_to(root.resolve())}, byte {byte}: {before:#04x} to {before ^ mask:#04x} (seed {seed})"
        assert end in ("refused", "no harm"), f"{told}: {end}"
        assert time.thread_time() - begun < MOST_SECONDS, told
        ends[end] += 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown << 10 < MOST_BYTES, f"{grown} KiB"
    return ends


def _opened(target: Target, want: Tensors, shapes: dict[str, tuple[int, ...]]) -> str:
    try:
        with open_checkpoint(target.path, given=target.given) as checkpoint:
            checkpoint.check_tensors(shapes)
            for name, tensor in want.items():
                if name in shapes and not torch.equal(checkpoint.read(name), tensor):
                    return f"opens with a wrong {name}"
    except CheckpointError as error:
        return "refused" if error.file and error.rule else "refused without file or rule"
    return "no harm"
