"""Data types by name: the safetensors format's names, and those that configurations have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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
"""For every key of ``layout.DTYPE_BYTES``."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

FLOAT_TYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""What models are kept and computed in, by the names of ``config.json`` and of options."""


def dtype_name(dtype: torch.dtype) -> str:
    """A type's name in ``config.json`` and in messages, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
