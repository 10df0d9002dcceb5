"""The compiled CPU kernels, for tests that are about them."""

from __future__ import annotations

import ctypes

import pytest

from serve.model.kernels.build import load_cpu_kernels
from serve.model.kernels.compiler import KernelUnavailable


def cpu_kernels() -> ctypes.CDLL:
    """As this user's cache has them; without a compiler, and for no other reason, the test is skipped."""
    try:
        return load_cpu_kernels()
    except KernelUnavailable as reason:
        if "compiler" not in str(reason):
            raise
        pytest.skip(f"no CPU kernels here: {reason}")
