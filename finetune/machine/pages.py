"""The memory of a rank's large tensors on a CPU (``pages.cpp``): how that is built, put to use, and given back."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from finetune.machine.process import LARGE_PAGES

SMALLEST_BYTES: Final = 256 << 10
"""Bytes of a tensor from which on its memory is kept in pages. A smaller number leaves fewer gaps in the C library's heap, and
has more tensors looked after; below this one there is little left to gain."""
_MOST_MAPPINGS: Final = 16_384
"""How many ranges of addresses pages may lie in; with more, some are given back. Linux lets a process have 65,530
(``vm.max_map_count``), and other libraries want some."""
_SOURCE: Final = Path(__file__).with_suffix(".cpp")
_FLAGS: Final = ("-O2", "-std=c++17", "-fPIC", "-shared")

_library: ctypes.CDLL | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """What this process has in pages, in bytes."""

    live: int
    """Pages of the tensors that there are."""
    held: int
    """Pages of tensors, and free ones: never more than tensors once took at the same time."""
    fresh: int
    """Asked of the system so far."""
    moved: int
    """Moved so far to where a tensor needed them in one piece."""


def build_name() -> str:
    """What a library of today's source is kept as."""
    return f"pages-{hashlib.sha256(_SOURCE.read_bytes() + ' '.join(_FLAGS).encode()).hexdigest()[:12]}"


def build_command(compiler: str, library: Path) -> list[str]:
    """What compiles the source into ``library``, against the installed torch, in about a second."""
    found = importlib.util.find_spec("torch")
    assert found is not None, "training needs torch"
    assert found.origin is not None, "torch is a package with a file"
    torch = Path(found.origin).parent
    places = ("-isystem", str(torch / "include"), f"-L{torch / 'lib'}")
    return [compiler, *_FLAGS, *places, str(_SOURCE), "-lc10", "-o", str(library)]


def use(library: Path, *, smallest: int = SMALLEST_BYTES, most_mappings: int = _MOST_MAPPINGS) -> None:
    """From now on torch's large tensors on the CPU have their memory in pages that this process keeps.

    Tensors that there are stay where they are. It cannot be undone.

    Args:
        library: as ``build_command`` makes it.
        smallest: bytes of the smallest tensor that is large.
        most_mappings: ranges of addresses, which the kernel counts; with more, pages are given back.

    Raises:
        OSError: the library cannot be loaded.
    """
    import torch  # noqa: F401  # whose library must be there before this one

    global _library
    loaded = ctypes.CDLL(str(library))
    large_pages = ctypes.c_int(os.environ.get(LARGE_PAGES) == "1")
    loaded.tessera_pages_start(ctypes.c_size_t(smallest), large_pages, ctypes.c_size_t(most_mappings))
    _library = loaded


def give_back() -> None:
    """Give free pages back to the system, where this process keeps some: what is done next needs other memory than a step."""
    if _library is not None:
        _library.tessera_pages_give_back()


def figures() -> Figures | None:
    """What there is; ``None`` where the C library alone has all tensors."""
    if _library is None:
        return None
    numbers = (ctypes.c_int64 * len(fields(Figures)))()
    _library.tessera_pages_figures(numbers)
    return Figures(*numbers)


def supported() -> bool:
    """Whether this system can move pages: Linux alone has mremap(2)."""
    return sys.platform == "linux"
