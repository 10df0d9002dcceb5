"""Log-probabilities under the model's own distribution, before anything a request asks for changes it.

Shapes.  R rows   V vocabulary   K likeliest
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve.types import TokenLogprob

_ROWS = 64
"""Rows whose fp64 copy is held at once."""


def logprobs_of(logits_RV: Tensor, tokens_R: Tensor, num_top: Sequence[int]) -> list[TokenLogprob]:
    """What each row says of its token, and of its likeliest ``num_top``.

    Args:
        logits_RV: fp32, finite peaks; not changed.
        tokens_R: int64, on the same device.
        num_top: one for each row; 0 for none.
    """
    told: list[TokenLogprob] = []
    for first in range(0, logits_RV.shape[0], _ROWS):
        rows = slice(first, first + _ROWS)
        told += _logprobs(logits_RV[rows], tokens_R[rows], num_top[rows])
    return told


def _logprobs(logits_RV: Tensor, tokens_R: Tensor, num_top: Sequence[int]) -> list[TokenLogprob]:
    normaliser_R1 = torch.logsumexp(logits_RV.double(), dim=1, keepdim=True)
    own_R1 = logits_RV.gather(1, tokens_R[:, None])
    rank_R1 = (logits_RV > own_R1).sum(dim=1, keepdim=True) + 1
    values_RK, ids_RK = logits_RV.topk(min(max(num_top), logits_RV.shape[1]), dim=1)
    # One copy to the host. fp64 holds ids and ranks exactly.
    likeliest_RK = values_RK.double() - normaliser_R1
    packed = torch.cat([own_R1.double() - normaliser_R1, rank_R1, tokens_R[:, None], likeliest_RK, ids_RK], dim=1).tolist()
    width = values_RK.shape[1]
    told = []
    for (logprob, rank, token, *top), count in zip(packed, num_top, strict=True):
        likeliest = zip(map(int, top[width : width + count]), top[: min(count, width)], strict=True)
        told.append(TokenLogprob(int(token), logprob, int(rank), tuple(likeliest)))
    return told
