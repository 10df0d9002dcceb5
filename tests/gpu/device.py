"""Where the tests of this folder run: on a CUDA device, or in a rehearsal on the CPU, with the same code and fewer cases.

``make test-gpu REHEARSE=1`` sets ``TESSERA_REHEARSE_GPU``; Triton's kernels are interpreted then.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import pytest
import torch

from serve.config import KernelsConfig
from serve.worker.loader import RankModel, Stopwatch, load_rank
from serve.worker.parallel import Ranks
from tests.serve.model.cuda.interpreter import patch_once
from tests.serve.worker.family_worker import settings
from tests.serve.worker.test_decode_graphs import Waits

REHEARSED: Final = os.environ.get("TESSERA_REHEARSE_GPU") == "1"
DEVICE: Final[Literal["cpu", "cuda"]] = "cpu" if REHEARSED else "cuda"
ON_DEVICE: Final = [
    pytest.mark.gpu,
    pytest.mark.skipif(not REHEARSED and not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
"""What a test of this folder is marked with."""
ALONE: Final = Ranks(0, 1)

if REHEARSED:
    patch_once()

T = TypeVar("T")


def some(cases: Iterable[T], *rehearsed: T) -> list[T]:
    """All cases; in a rehearsal these few of them."""
    every = list(cases)
    assert set(rehearsed) <= set(every), "what is rehearsed is one of the cases"
    return list(rehearsed) if REHEARSED else every


def processors() -> int:
    """Multiprocessors of the device; eight stand for them in a rehearsal."""
    return 8 if REHEARSED else torch.cuda.get_device_properties(0).multi_processor_count


def has_fp8() -> bool:
    """Whether the device computes with 8-bit floating-point numbers, as the CPU does in a rehearsal."""
    return REHEARSED or torch.cuda.get_device_capability() >= (8, 9)


def groups_products() -> bool:
    """Whether torch computes the products of all experts at once on the device, as the CPU does in a rehearsal."""
    return REHEARSED or torch.cuda.get_device_capability()[0] in (9, 10)


def reserved_bytes() -> int:
    """What torch holds of the device's memory, once what nothing uses is given back; 0 in a rehearsal."""
    if REHEARSED:
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def load_on_device(folder: Path, dtype: str, **options: Any) -> RankModel:
    """The one rank's model of a checkpoint, whose steps are not captured; ``options`` as ``ModelConfig`` has them."""
    config = settings(folder, 1, dtype)
    model = replace(config.model, device=DEVICE, **options)
    config = replace(config, model=model, kernels=KernelsConfig(cuda_graphs="off"))
    return load_rank(config, 0, torch.device(DEVICE), lambda: ALONE, Stopwatch())[0]


@contextmanager
def waits_of_host() -> Iterator[list[str]]:
    """What the host waits for the device for: as torch warns of it there, as operations tell in a rehearsal."""
    found: list[str] = []
    if REHEARSED:
        with Waits() as waits:
            yield found
        found += waits.found
        return
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # warns of itself, too
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [str(warning.message) for warning in warned if "called a synchronizing" in str(warning.message)]
