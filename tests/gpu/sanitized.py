"""Every Triton kernel launched on little, for NVIDIA's compute-sanitizer to watch what memory it touches.

``python -m tests.gpu.sanitized`` is the program that is watched; with ``--beyond`` it has one kernel write behind the end of
its cache, which must be found. Sizes are no multiples of what a program computes at once, so that what is masked matters.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from triton.runtime.jit import KernelInterface

from benchmarks.gpu_tile_cells import Attention, AttentionCell, Linear, Where
from serve.model.cuda import kernels, linear_kernels, norm_kernels, residuals
from serve.model.cuda.layers import norm_by_one_launch

ROOT: Final = Path(__file__).resolve().parents[2]
FOUND: Final = 99
"""Exit code where the sanitizer has found anything."""
PADDING: Final = 256
"""Bytes behind each allocation that belong to nobody."""
TOOLKIT: Final = Path("/usr/local/cuda")
MISSING: Final = (
    "compute-sanitizer is not installed: it comes with CUDA's toolkit, and as nvidia-cuda-sanitizer-api (CUDA 13) or "
    "nvidia-cuda-sanitizer-api-cu12 from PyPI"
)


def kernels_by_name() -> dict[str, Any]:
    """Those that are launched; what begins with an underscore is called by them."""
    modules = (kernels, linear_kernels, norm_kernels)
    found = {name: kernel for module in modules for name, kernel in vars(module).items() if not name.startswith("_")}
    return {name: kernel for name, kernel in found.items() if isinstance(kernel, KernelInterface)}


@contextmanager
def noted() -> Iterator[set[str]]:
    """Within, the names of the kernels that are launched, wherever of the server."""

    class Noted:
        def __init__(self, name: str, kernel: Any) -> None:
            self._name, self._kernel = name, kernel

        def __getitem__(self, grid: object) -> Any:
            launched.add(self._name)
            return self._kernel[grid]

    launched: set[str] = set()
    with ExitStack() as stack:
        for name, kernel in kernels_by_name().items():
            users = [
                module
                for module in list(sys.modules.values())
                if getattr(module, "__name__", "").startswith("serve.model.cuda")
            ]
            for module in (module for module in users if vars(module).get(name) is kernel):
                stack.enter_context(patch.object(module, name, Noted(name, kernel)))
        yield launched


def launch_all(where: Where, *, fp8: bool) -> set[str]:
    """Launch each kernel; the names of those that were.

    Args:
        fp8: whether the device computes with 8-bit floating-point numbers.

    Raises:
        AssertionError: a result is no number.
    """
    attention = Attention("tiny", 4, 2, 80, 20, ((1, 300),))
    cells = [
        *attention.cells(where),
        *(replace(attention, fp8=True).cells(where) if fp8 else ()),
        *replace(attention, spans=((1, 37),), long=True).cells(where),
        *(cell for name in ("int8", "int4") for rows in (3, 21) for cell in Linear(name, (rows,), ((40, 130),)).cells(where)),
    ]
    kinds = [attention, *([replace(attention, fp8=True)] if fp8 else []), replace(attention, long=True)]
    kinds += [Linear(name, (rows,), ()) for name in ("int8", "int4") for rows in (3, 21)]
    with noted() as launched, torch.no_grad():
        for kind, cell in zip(kinds, cells, strict=True):
            with cell.shaped(kind.in_use(where.processors)) as launch:
                assert launch(0).isfinite().all(), cell.name
        norm = LlamaRMSNorm(100).to(where.device)
        norm_by_one_launch(norm)
        x = torch.randn(3, 100, device=where.device)
        assert norm(x).isfinite().all()
        assert residuals._sum((x, x), [residuals._Norm(nn.LayerNorm(100).to(where.device))]).isfinite().all()
    return launched


def write_beyond(where: Where) -> None:
    """Have a kernel write a token's keys and values behind the last block of their cache."""
    kind = Attention("tiny", 4, 2, 80, 20, ((1, 16),))
    cell = AttentionCell(kind, 1, 16, where)
    cell._layout = replace(cell._layout, slots=cell._layout.slots + 1)
    with cell.shaped(kind.in_use(where.processors)) as launch:
        launch(0)
    torch.cuda.synchronize()


def sanitizer() -> str | None:
    """compute-sanitizer, where it is installed: on the path, in CUDA's toolkit, or beside this interpreter's packages."""
    beside = Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin")
    toolkits = (Path(os.environ.get("CUDA_HOME", TOOLKIT)) / "bin", TOOLKIT / "bin")
    folders = [os.environ.get("PATH", ""), *map(str, toolkits), *map(str, sorted(beside))]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def watched(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run this module under a sanitizer: each tensor is an allocation of its own, and torch's own kernels are not looked at."""
    command = [program, "--tool", "memcheck", "--error-exitcode", str(FOUND), "--target-processes", "application-only"]
    command += ["--report-api-errors", "no", "--padding", str(PADDING)]  # torch asks for what a driver may not know
    for name in kernels_by_name():
        command += ["--kernel-name", f"kernel_substring={name}"]
    command += [sys.executable, "-m", "tests.gpu.sanitized", *words]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def main() -> int:
    """``python -m tests.gpu.sanitized``; prints the names of the kernels that were launched."""
    where = Where("cuda", torch.cuda.get_device_properties(0).multi_processor_count, 0)
    if "--beyond" in sys.argv:
        write_beyond(where)
        return 0
    launched = launch_all(where, fp8=torch.cuda.get_device_capability() >= (8, 9))
    torch.cuda.synchronize()
    sys.stdout.write("\n" + json.dumps(sorted(launched)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
