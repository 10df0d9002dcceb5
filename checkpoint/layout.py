"""Where a tensor's elements lie in a file.

Both file formats come down to the same thing: elements of one dtype at fixed strides from a byte offset. A reader's work is to
find these places and to prove them sound; ``slices`` does the reading for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of the safetensors format, for the dtypes Tessera keeps."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of one stored tensor before it is read."""

    name: str
    """The name in the file, which may differ from the model's; see ``Checkpoint.resolve``."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    """The file's name inside the checkpoint's folder."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The place of one tensor's elements in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, one for each dimension, never negative, and never 0 where the dimension is longer than 1."""
    offset_bytes: int
    """From the start of the file to element (0, …, 0)."""


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a row-major tensor of ``shape``."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def zero_size_rule(name: str, shape: tuple[int, ...]) -> str:
    """The sentence for a tensor without elements: nearly always what is left of a model saved without gathering it."""
    return (
        f"tensor {name!r} has shape {list(shape)} and holds no element; saving a model under ZeRO-3 without gathering its "
        "parameters leaves such empty tensors: export the weights again with the parameters gathered"
    )
