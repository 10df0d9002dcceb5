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
    inputs: tuple[int, int]
    """Features that each of the two takes."""


class PackedExperts:
    """What computes a layer's experts; see ``Mix``.

    How many rows each of them gets is a number that the host waits for, in every step: a recorded step calls this again, and a
    CUDA graph cannot hold it. Rows times what they count are summed in the order of ``K``.
    """

    def __init__(
        self,
        experts: Sequence[Expert],
        gate: Callable[[Tensor], Tensor],
        finish: Callable[[Tensor], Tensor] | None = None,
        *,
        first: int = 0,
    ) -> None:
        """
        Args:
            experts: those that are here, which follow one another; what others add is left out.
            gate: makes what ``down`` takes of what ``gate_up`` gives.
            finish: makes what is given of the sum.
            first: the number of the first of them.
        """
        self._experts, self._gate, self._finish = tuple(experts), gate, finish
        self._first = first

    def __call__(self, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out_TH = torch.empty_like(hidden_TH)
        anew(self._compute, hidden_TH, experts_TK, weights_TK, out_TH)
        return out_TH if self._finish is None else self._finish(out_TH)

    def are_finite(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a number of this type that every weight is multiplied by makes no NaN or infinity of any.

        A few tokens are not routed to every expert.
        """
        for expert in self._experts:
            for product, inputs in zip((expert.gate_up, expert.down), expert.inputs, strict=True):
                if not bool(product(torch.full((1, inputs), 1 / inputs, dtype=dtype, device=device)).isfinite().all()):
                    return False
        return True

    def _compute(self, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, out_TH: Tensor) -> None:
        flat_S = experts_TK.flatten()
        order_S = flat_S.argsort(stable=True)
        rows_SH = hidden_TH[order_S // experts_TK.shape[1]]
        given_SH = torch.zeros_like(rows_SH)
        end = self._first + len(self._experts)
        counts = flat_S.bincount(minlength=end).tolist()
        begin = sum(counts[: self._first])
        for expert, count in zip(self._experts, counts[self._first : end], strict=True):
            if count:
                rows = slice(begin, begin + count)
                given_SH[order_S[rows]] = expert.down(self._gate(expert.gate_up(rows_SH[rows])))
                begin += count
        weighted_TKH = given_SH.view(*experts_TK.shape, -1) * weights_TK.unsqueeze(-1)
        out_TH.copy_(weighted_TKH.sum(dim=1))
