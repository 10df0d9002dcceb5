"""Log-probabilities under the model's own distribution, before anything a request asks for changes it.

Shapes.  R rows   V vocabulary   K likeliest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve.model.sending import Fetched
from serve.types import TokenLogprob

_ROWS = 64
"""Rows whose fp64 copy is held at once."""


@dataclass(frozen=True, slots=True)
class LaunchedLogprobs:
    """What some rows say of their tokens, while the device may still be computing it."""

    packed: tuple[Fetched, ...]
    """fp64 [rows, 3 + 2 K]: own logprob, rank and id, the likeliest logprobs and their ids."""
    num_top: tuple[int, ...]
    """What each row wants of its likeliest."""

    def read(self) -> list[TokenLogprob]:
        """Wait for the device and tell each row's."""
        rows = (row for part in self.packed for row in part.tolist())
        return [_told(row, count) for row, count in zip(rows, self.num_top, strict=True)]


def logprobs_of(logits_RV: Tensor, tokens_R: Tensor, num_top: Sequence[int]) -> LaunchedLogprobs:
    """What each row says of its token, and of its likeliest ``num_top``; the host waits for nothing.

    Args:
        logits_RV: fp32, finite peaks; not changed.
        tokens_R: int64, on the same device.
        num_top: one for each row; 0 for none.
    """
    parts = (slice(first, first + _ROWS) for first in range(0, logits_RV.shape[0], _ROWS))
    packed = tuple(Fetched(_packed(logits_RV[rows], tokens_R[rows], max(num_top[rows]))) for rows in parts)
    return LaunchedLogprobs(packed, tuple(num_top))


def _packed(logits_RV: Tensor, tokens_R: Tensor, most: int) -> Tensor:
    normaliser_R1 = torch.logsumexp(logits_RV.double(), dim=1, keepdim=True)
    own_R1 = logits_RV.gather(1, tokens_R[:, None])
    rank_R1 = (logits_RV > own_R1).sum(dim=1, keepdim=True) + 1
    values_RK, ids_RK = logits_RV.topk(min(most, logits_RV.shape[1]), dim=1)
    # One copy to the host. fp64 holds ids and ranks exactly.
    likeliest_RK = values_RK.double() - normaliser_R1
    return torch.cat([own_R1.double() - normaliser_R1, rank_R1, tokens_R[:, None], likeliest_RK, ids_RK], dim=1)


def _told(row: list[float], count: int) -> TokenLogprob:
    logprob, rank, token, *top = row
    width = len(top) // 2
    likeliest = zip(map(int, top[width : width + count]), top[: min(count, width)], strict=True)
    return TokenLogprob(int(token), logprob, int(rank), tuple(likeliest))
