"""What stands for libraries that compute on GPUs alone: their signatures, and the same numbers in plain torch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class CountedVarlen:
    """In the place of ``torch.nn.attention.varlen.varlen_attn``; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        self.calls += 1
        assert query.shape == key.shape == value.shape, "it knows no groups of heads"
        assert {part.stride(-1) for part in (query, key, value)} == {1}
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        bounds = cu_seq_q.tolist()
        assert bounds == cu_seq_k.tolist()
        assert (bounds[0], bounds[-1]) == (0, len(query))
        lengths = [end - begin for begin, end in pairwise(bounds)]
        assert max(lengths) == max_q == max_k
        before, after = window_size
        assert after == 0, "a query sees nothing behind it"
        parts = []
        for sample in zip(*(part.split(lengths) for part in (query, key, value)), strict=True):
            q, k, v = (part.transpose(0, 1) for part in sample)  # [H, tokens, D]
            scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
            ones = torch.ones(scores.shape[1:], dtype=torch.bool)
            seen = ones.tril() if before < 0 else ones.tril().triu(-before)
            parts.append((scores.masked_fill(~seen, float("-inf")).softmax(dim=-1) @ v).transpose(0, 1))
        return torch.cat(parts)


class CountedLiger:
    """In the place of ``liger_kernel.transformers.functional.liger_fused_linear_cross_entropy``; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
    ) -> Tensor:
        self.calls += 1
        assert (input.dim(), target.dim()) == (2, 1)
        assert len(input) == len(target)
        assert accum_dtype == torch.float32, "many rows are added up"
        logits = nn.functional.linear(input, weight, bias).float()
        return nn.functional.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
