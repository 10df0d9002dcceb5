"""The compiled CPU kernels, for tests that are about them."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from pathlib import Path

import pytest

from serve.model.kernels.ahead import build_ahead, processor_words
from serve.model.kernels.build import load_cpu_kernels
from serve.model.kernels.compiler import KernelUnavailable

BEST = "best"
LEVELS = (BEST, "x86-64-v3") if "avx512f" in processor_words() else (BEST,)
"""What ``kernels_of`` gives here: where the best are for AVX-512, those for AVX2 alone too."""


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
    """The kernels of one of ``LEVELS``; others than the best are compiled once for this process, in seconds."""
    best = cpu_kernels()
    if level == BEST:
        return best
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(build_ahead([level], Path(folder))[0]))
