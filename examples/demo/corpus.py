"""The demo's text: the source of the standard library that belongs to the interpreter running it."""

from __future__ import annotations

import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "distutils", "turtledemo", "__pycache__"}
    # Tables rather than code: they teach a small model digits.
    | {"encodings", "pydoc_data"}
)
"""Folders that are left out, wherever they stand."""

LARGEST_FILE_BYTES = 400_000


@dataclass(frozen=True, slots=True)
class Corpus:
    """What was gathered."""

    folder: Path
    num_files: int
    num_bytes: int


class NoSource(Exception):
    """The interpreter comes without the source of its library (a zipped or stripped installation)."""


def gather(into: Path, library: Path | None = None) -> Corpus:
    """Copy the library's modules into one folder, flat, named by their dotted path.

    Args:
        into: emptied and filled.
        library: where the modules are; the running interpreter's own standard library unless given.

    Raises:
        NoSource: there is next to nothing to train on.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    num_files = num_bytes = 0
    for source in sorted(library.rglob("*.py")):
        parts = source.relative_to(library).parts
        if SKIPPED.intersection(parts) or parts[0].startswith("config-") or source.stat().st_size > LARGEST_FILE_BYTES:
            continue
        try:
            text = source.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few modules declare another encoding; they are not missed
            continue
        if not text.strip():
            continue
        (into / ".".join(parts)).write_text(text, encoding="utf-8")
        num_files += 1
        num_bytes += len(text.encode())
    if num_bytes < 1_000_000:
        raise NoSource(f"{library} holds only {num_bytes:,} bytes of Python source; the demo needs at least 1 MB to train on")
    return Corpus(into, num_files, num_bytes)
