"""The compiled CPU kernels, for tests that are about them."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
from pathlib import Path
from typing import Final

import pytest

from serve.model.kernels.ahead import build_ahead, processor_words
from serve.model.kernels.build import load_cpu_kernels
from serve.model.kernels.compiler import KernelUnavailable, compile_kernels, find_compiler
from tests.conftest import SCRATCH

BEST = "best"
LEVELS = (BEST, "x86-64-v3") if "avx512f" in processor_words() else (BEST,)
"""What ``kernels_of`` gives here: where the best are for AVX-512, those for AVX2 alone too."""

WIDE: Final = "sixteen lanes"
"""Attention as processors with AVX512-BF16 compute it, on any: sixteen lanes, products of pairs of bf16 numbers written out."""


def cpu_kernels() -> ctypes.CDLL:
    """As this user's cache has them; without a compiler, and for no other reason, the test is skipped."""
    try:
        return load_cpu_kernels()
    except KernelUnavailable as reason:
        if "compiler" not in str(reason):
            raise
        pytest.skip(f"no CPU kernels here: {reason}")


@functools.cache
def kernels_of(level: str) -> ctypes.CDLL:
    """The kernels of one of ``LEVELS``, or of another level, or ``WIDE``."""
    best = cpu_kernels()
    return best if level == BEST else ctypes.CDLL(str(library_of(level)))


def library_of(level: str) -> Path:
    """The library of a level, or ``WIDE``: compiled, in many seconds, by the first of a run's processes that wants it."""
    folder = Path(os.environ[SCRATCH], "kernels", level)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one waits for the other, and then finds it
        if found := list(folder.glob("*.so")):
            return found[0]
        if level != WIDE:
            return build_ahead([level], folder)[0]
        compiler, library = find_compiler(), folder / "wide.so"
        if compiler is None:
            pytest.skip("no compiler here")
        # -O1 takes a quarter of the time: nobody runs these instructions, what counts are the numbers that they make.
        compile_kernels(compiler, ("-march=native", "-O1", "-DTESSERA_WIDTH=16", "-DTESSERA_PAIRS"), library)
        return library
