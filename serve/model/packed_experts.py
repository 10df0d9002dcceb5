"""Experts whose weights are packed one by one, as linear layers are: each computes the rows that were routed to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve.model.linear import Matmul
from serve.model.recording import anew

# Shapes.  T tokens   K experts of each token   S = T * K rows, one for each expert of each token   H hidden features

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden states [T, H], numbers of their experts [T, K], what each counts [T, K]) -> the experts' weighted sum [T, H]."""


@dataclass(frozen=True, slots=True)
class Expert:
    """One gated feed-forward network, or a rank's share of it."""

    gate_up: Matmul
    down: Matmul


def packed_experts(experts: Sequence[Expert], gate: Callable[[Tensor], Tensor]) -> Mix:
    """What computes a layer's experts.

    How many rows each of them gets is a number that the host waits for, in every step: a recorded step calls this again, and a
    CUDA graph cannot hold it. Weighted rows are summed in the wider of their two types and rounded once, in the order of ``K``.

    Args:
        gate: makes what ``down`` takes of what ``gate_up`` gives.
    """

    def mix(hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out_TH = torch.empty_like(hidden_TH)
        anew(compute, hidden_TH, experts_TK, weights_TK, out_TH)
        return out_TH

    def compute(hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, out_TH: Tensor) -> None:
        flat_S = experts_TK.flatten()
        order_S = flat_S.argsort(stable=True)
        rows_SH = hidden_TH[order_S // experts_TK.shape[1]]
        given_SH = torch.empty_like(rows_SH)
        begin = 0
        for expert, count in zip(experts, flat_S.bincount(minlength=len(experts)).tolist(), strict=True):
            if count:
                rows = slice(begin, begin + count)
                given_SH[order_S[rows]] = expert.down(gate(expert.gate_up(rows_SH[rows])))
                begin += count
        weighted_TKH = given_SH.view(*experts_TK.shape, -1) * weights_TK.unsqueeze(-1)
        out_TH.copy_(weighted_TKH.sum(dim=1))

    return mix
