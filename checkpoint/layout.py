"""Where a tensor's elements lie in a file.

Both file formats come down to the same thing: elements of one dtype at fixed strides from a byte offset. A reader's work is to
find these places and to prove them sound; ``slices`` does the reading for all of them. Nothing here needs torch: a process that
only looks at a checkpoint is spared its seconds of import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DTYPE_BYTES: dict[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of one element, by the safetensors format's names of the dtypes that Tessera keeps."""


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

    dtype: str
    """A key of ``DTYPE_BYTES``."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, one for each dimension, never negative, and never 0 where the dimension is longer than 1."""
    offset_bytes: int
    """From the start of the file to element (0, …, 0)."""

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


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
