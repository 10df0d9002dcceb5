"""No Triton kernel touches memory that is not its own, by NVIDIA's compute-sanitizer: ``make sanitize-gpu``, ``make test-gpu``.

Skipped where it is not installed, or without a device, and said so. A rehearsal launches the same kernels on the CPU.
"""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks.gpu_tile_cells import Where
from tests.gpu import sanitized
from tests.gpu.device import ON_DEVICE, REHEARSED, processors

pytestmark = ON_DEVICE


def test_no_kernel_touches_memory_that_is_not_its_own() -> None:
    every = sorted(sanitized.kernels_by_name())
    if REHEARSED:
        assert sorted(sanitized.launch_all(Where("cpu", processors(), 0), fp8=True)) == every
        return
    program = sanitized.sanitizer()
    if program is None:
        pytest.skip(sanitized.MISSING)
    beyond = sanitized.watched(program, "--beyond")
    assert beyond.returncode == sanitized.FOUND, f"what is wrong is not found, so nothing is proved: {said(beyond)}"
    assert "write_kv" in beyond.stdout, said(beyond)
    clean = sanitized.watched(program)
    assert clean.returncode == 0, said(clean)
    (names,) = (json.loads(line) for line in clean.stdout.splitlines() if line.startswith("["))
    assert names == every
    assert "ERROR SUMMARY: 0 errors" in clean.stdout, said(clean)


def said(ended: subprocess.CompletedProcess[str]) -> str:
    """The end of what a run has said."""
    return f"exit code {ended.returncode}\n{ended.stdout[-3000:]}\n{ended.stderr[-2000:]}"
