"""Whether an error says that a CUDA device has no memory left, whoever asked for it."""

from __future__ import annotations

import re
from typing import Final

import torch

_OUTSIDE: Final = re.compile(
    r"CUDA error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|CU(?:BLAS|DNN|SPARSE)_STATUS_ALLOC_FAILED"
    r"|Triton Error \[CUDA\]: out of memory|Cuda failure (?:\d+ )?'out of memory'"
)
"""What is said by those who ask the driver itself: its own code and graphs, cuBLAS and its kin, Triton, NCCL."""
_OF_ANOTHER: Final = "ncclRemoteError"
"""NCCL then tells what another rank ended of."""


def is_out_of_device_memory(error: BaseException) -> bool:
    """Whether torch's allocator, the driver or one of its libraries found no memory left on the device.

    Those beside torch's allocator take what it has left of the device, so that they may be the first to be in want of it. Their
    errors are of the types that broken devices have, too, and differ in their text alone.
    """
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (_OUTSIDE.search(said) is not None and _OF_ANOTHER not in said)
