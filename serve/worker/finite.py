"""Whether the weights of a checkpoint are finite numbers in the type that they are served in."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Final

import torch
from torch import Tensor

from checkpoint import Checkpoint, CheckpointError, TensorInfo
from checkpoint.dtypes import dtype_name

_PIECE_BYTES: Final = 4 << 20
"""A piece stays in the processor's cache and its memory in the heap: of larger ones, most of the time goes to fresh pages."""


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite; true of a tensor without elements."""
    if tensor.numel() == 0:
        return True
    return all(bool(end.isfinite()) for end in tensor.aminmax())  # one pass, no second tensor of that size


def check_weights(checkpoint: Checkpoint, names: Collection[str], dtype: torch.dtype, *, file: str | None = None) -> None:
    """Read tensors once, in pieces, and refuse the first that is not finite.

    Args:
        names: stored names of the tensors that a model takes; others, such as an old release's masks, are not looked at.
        dtype: the type the weights are served in, which may be smaller than the one they are stored in.
        file: look at this file's tensors alone.

    Raises:
        CheckpointError: names the file and the tensor; or a file cannot be read.
    """
    for info in checkpoint.tensors.values():
        if info.name not in names or file not in (None, info.file):
            continue
        for part in _pieces(info):
            if not is_finite(checkpoint.read(info.name, part, dtype=dtype)):
                served = dtype_name(dtype)
                rule = f"tensor {info.name!r} holds numbers that are NaN or infinite in {served}; it is not served"
                raise CheckpointError(info.file, rule)


def _pieces(info: TensorInfo) -> Iterable[tuple[slice, ...]]:
    """Rows of bounded size that together are the tensor."""
    num_bytes = math.prod(info.shape) * info.dtype.itemsize
    if not info.shape or not num_bytes:
        return [()]
    rows = max(1, _PIECE_BYTES * info.shape[0] // num_bytes)
    return ((slice(row, row + rows),) for row in range(0, info.shape[0], rows))
