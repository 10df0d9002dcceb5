"""The types that weights are kept and computed in, by the names that configurations and commands have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from checkpoint.dtypes import FLOAT_TYPES

DTYPES: Final[Mapping[str, torch.dtype]] = {
    **FLOAT_TYPES,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""By torch's own names (``save.dtype``, ``--dtype``) and by those of ``run.precision``."""
