"""liger-kernel's loss from the last hidden states: its Triton kernels, where it is installed and the device is a GPU.

N rows of hidden states   H hidden size   V vocabulary
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Final, Protocol, cast

import torch
from torch import Tensor

from finetune.data.targets import IGNORE_INDEX

_MODULE: Final = "liger_kernel.transformers.functional"
_OPTIONS: Final = frozenset(("bias", "ignore_index", "reduction", "accum_dtype"))


class LigerLoss(Protocol):
    """``liger_kernel.transformers.functional.liger_fused_linear_cross_entropy``."""

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        ignore_index: int,
        reduction: str,
        accum_dtype: torch.dtype | None,
    ) -> Tensor:
        """The loss of [N, H], [V, H] and int64 [N]; ``accum_dtype`` is what the weight's gradient is added up in."""
        ...


def liger_loss() -> LigerLoss | None:
    """liger-kernel's, where it is installed with the options that are asked for here."""
    try:
        found = import_module(_MODULE).liger_fused_linear_cross_entropy
    except (ImportError, AttributeError):
        return None
    return cast(LigerLoss, found) if set(inspect.signature(found).parameters) >= _OPTIONS else None


def obstacle(device: str, precision: str) -> str:
    """Why liger-kernel's loss cannot be computed; empty where it can.

    Args:
        device: ``cpu`` or ``cuda``.
        precision: ``fp32``, ``bf16`` or ``fp16``.
    """
    if device != "cuda":
        return f"liger-kernel's is for GPUs, and this run is on the {device}"
    if precision == "fp16":
        return "in fp16 its small gradients would be lost"
    return "" if liger_loss() is not None else "liger-kernel is not installed, or is too old"


def fused_rows(num_rows: int, vocabulary: int, hidden: int) -> int:
    """Rows whose logits liger-kernel has at once: as many as make them about as large as the hidden states."""
    wanted = -(-num_rows // -(-vocabulary // hidden))
    return min(num_rows, 1 << (wanted - 1).bit_length())


def fused_linear_cross_entropy(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, loss: LigerLoss
) -> Tensor:
    """``finetune.model.loss.linear_cross_entropy`` by ``loss``: the sum over the targets that count, in fp32."""
    # Added up in the weight's own type, many rows' gradients would round one another away.
    summed = loss(
        hidden_NH, weight_VH, targets_N, bias_V, ignore_index=IGNORE_INDEX, reduction="sum", accum_dtype=torch.float32
    )
    return summed.float()
