"""The arithmetic of sampling, for all rows of a step at once: in torch, on any device. ``native`` has it for the CPU.

Shapes.  R rows of logits   N of them that a call is about   V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from serve.model.sending import send
from serve.types import SamplingParams
from serve.worker.sampling.seen import Seen

_ROWS: Final = 64
"""Rows whose sorted and fp64 copies are held at once."""


class SamplingBackend(Protocol):
    """What computes. Among equal logits the smaller id counts as the likelier, on every back end."""

    def peaks(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """The largest logit of each row, NaN where it holds one, and the first id that has it: fp32 [R], int64 [R]."""
        ...

    def choose(
        self,
        logits_RV: Tensor,
        params: Sequence[SamplingParams],
        uniform: Sequence[float],
        seen: Sequence[Seen | None],
        unread_R: Tensor | None = None,
    ) -> Choice:
        """A token for each row.

        What it has ``seen`` is changed by its repetition, presence and frequency penalties. Then it is the likeliest where its
        temperature is 0. Else temperature, min-p, top-k, top-p and typical-p are applied, in this order, and it is the one at
        which the mass of those that are left, by their ids, passes ``uniform`` of it.

        ``logits_RV`` may be changed in place. Rows whose peak is not finite get some token or other.

        Args:
            unread_R: a token of each row that is not in ``seen`` yet, int64 on the device; -1 where there is none.
        """
        ...


class Choice(NamedTuple):
    """The tokens of R rows."""

    raw_peaks_R: Tensor
    """fp32 [R], the largest logit of each row as it came, NaN where it held one."""
    peaks_R: Tensor
    """fp32 [R], the same after the penalties."""
    tokens_R: Tensor
    """int64 [R]."""


class Manner(IntEnum):
    """What drawing a row's token takes: each manner does all that those before it do."""

    PLAIN = 0
    """Temperature and min-p."""
    CUT = 1
    """Top-k and top-p besides: the row is sorted."""
    TYPICAL = 2
    """Typical-p besides: it is sorted twice."""


def manner_of(params: SamplingParams) -> Manner:
    """The least manner that draws by these parameters."""
    if params.typical_p < 1.0:
        return Manner.TYPICAL
    return Manner.CUT if params.top_k or params.top_p < 1.0 else Manner.PLAIN


def draw_numbers(params: Sequence[SamplingParams], uniform: Sequence[float], vocabulary: int) -> Tensor:
    """What ``draw`` is told of each of N rows, on the host: fp64 [6, N]."""
    rows = [
        (p.temperature, floor_of(p), min(p.top_k, vocabulary) if p.top_k else vocabulary, p.top_p, p.typical_p, u)
        for p, u in zip(params, uniform, strict=True)
    ]
    return torch.tensor(list(zip(*rows, strict=True)), dtype=torch.float64)


class TorchSampling:
    """The reference: every device."""

    def peaks(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """The largest logit of each row, NaN where it holds one, and the first id that has it: fp32 [R], int64 [R]."""
        peaks_R, places_R = logits_RV.max(dim=1)
        return peaks_R, places_R

    def choose(
        self,
        logits_RV: Tensor,
        params: Sequence[SamplingParams],
        uniform: Sequence[float],
        seen: Sequence[Seen | None],
        unread_R: Tensor | None = None,
    ) -> Choice:
        """A token for each row: the likeliest at temperature 0, else one that is drawn at the row's ``uniform``.

        Logits of what a row has ``seen`` are changed in place by its penalties first. Rows that are drawn in one manner are
        drawn together.
        """
        raw_peaks_R, tokens_R = peaks_R, _ = self.peaks(logits_RV)
        if penalise(logits_RV, params, seen, unread_R):
            peaks_R, tokens_R = self.peaks(logits_RV)
        drawn = [(row, manner_of(p)) for row, p in enumerate(params) if p.temperature > 0]
        for manner in sorted({manner for _, manner in drawn}):
            rows = [row for row, own in drawn if own is manner]
            rows_N = send(torch.tensor(rows), logits_RV.device)
            numbers_6N = draw_numbers([params[row] for row in rows], [uniform[row] for row in rows], logits_RV.shape[1])
            tokens_R[rows_N] = draw(logits_RV[rows_N], send(numbers_6N, logits_RV.device), manner)
        return Choice(raw_peaks_R, peaks_R, tokens_R)


def penalise(
    logits_RV: Tensor, params: Sequence[SamplingParams], seen: Sequence[Seen | None], unread_R: Tensor | None = None
) -> bool:
    """Change what rows have seen by their penalties, in place; whether any has seen something. ``unread_R``: see ``choose``."""
    rows = [row for row, each in enumerate(seen) if each is not None]
    if not rows:
        return False
    device, known = logits_RV.device, [each for each in seen if each is not None]
    lengths = [len(each.ids) for each in known]
    rules = [(params[row].repetition_penalty, params[row].presence_penalty, params[row].frequency_penalty) for row in rows]
    rules_3N = send(torch.tensor(rules, dtype=torch.float64), device).float().T
    row_N = send(torch.tensor(rows), device)
    place_M = send(torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)), device)
    id_M = send(torch.cat([torch.frombuffer(each.ids, dtype=torch.int32) for each in known]).long(), device)
    times_M = send(torch.cat([torch.frombuffer(each.times, dtype=torch.int32) for each in known]).float(), device)
    row_M = row_N[place_M]
    changed_M = penalised(logits_RV[row_M, id_M], rules_3N[:, place_M], times_M)
    if unread_R is None:
        logits_RV[row_M, id_M] = changed_M
        return True
    unread_N = unread_R[row_N]
    last_N, is_known_M = unread_N.clamp(min=0), id_M == unread_N[place_M]
    before_N = torch.zeros(len(rows), device=device).index_add_(0, place_M, times_M * is_known_M)
    own_N = penalised(logits_RV[row_N, last_N], rules_3N, before_N + 1.0)
    logits_RV[row_M, id_M] = changed_M
    logits_RV[row_N, last_N] = torch.where(unread_N < 0, logits_RV[row_N, last_N], own_N)
    return True


def penalised(values_X: Tensor, rules_3X: Tensor, times_X: Tensor) -> Tensor:
    """Logits of what was seen, as penalties change them, fp32.

    Args:
        values_X: fp32, any shape.
        rules_3X: repetition, presence and frequency penalty of each, fp32.
        times_X: how often each was generated, fp32.
    """
    again_X, presence_X, frequency_X = rules_3X
    values_X = torch.where(values_X > 0, values_X / again_X, values_X * again_X)
    return values_X - torch.where(times_X > 0, presence_X + frequency_X * times_X, 0.0)


def draw(logits_NV: Tensor, numbers_6N: Tensor, manner: Manner) -> Tensor:
    """A token for each of N rows, int64 [N]: see ``SamplingBackend.choose``. May be captured.

    A row gets the same token in each manner that does all that it asks for.

    Args:
        logits_NV: fp32, after the penalties; not changed.
        numbers_6N: ``draw_numbers``, on the same device. A row whose temperature is 0 gets some token or other.
    """
    return torch.cat(
        [
            _drawn(logits_NV[first : first + _ROWS], numbers_6N[:, first : first + _ROWS], manner)
            for first in range(0, logits_NV.shape[0], _ROWS)
        ]
    )


def _drawn(logits_NV: Tensor, numbers_6N: Tensor, manner: Manner) -> Tensor:
    temperature_N1, floor_N1 = numbers_6N[:2].float()[:, :, None].unbind()
    # Shift before dividing: a tiny temperature then sends everything but the peak to -inf instead of overflowing.
    logits_NV = (logits_NV - logits_NV.max(dim=1, keepdim=True).values) / temperature_N1
    logits_NV.masked_fill_(logits_NV < floor_N1, -math.inf)
    if manner > Manner.PLAIN:
        logits_NV = _truncated(logits_NV, *numbers_6N[2:5, :, None].unbind(), typical=manner is Manner.TYPICAL)
    mass_NV = torch.exp(logits_NV).double().cumsum(dim=1)
    total_N1 = mass_NV[:, -1:].contiguous()
    chosen_N = torch.searchsorted(mass_NV, numbers_6N[5, :, None] * total_N1, right=True).squeeze(1)
    # u * total may round up to the total, one past the last token with any mass.
    last_N = torch.searchsorted(mass_NV, total_N1).squeeze(1)
    return torch.minimum(chosen_N, last_N).clamp_(max=logits_NV.shape[1] - 1)


def floor_of(params: SamplingParams) -> float:
    """The logit, with the peak at 0 and the temperature applied, below which min-p drops a token."""
    return math.log(params.min_p) if params.min_p > 0.0 else -math.inf


def _truncated(logits_CV: Tensor, top_k_C1: Tensor, top_p_C1: Tensor, typical_p_C1: Tensor, *, typical: bool) -> Tensor:
    """Top-k, then top-p, then typical-p: what is cut is -inf. ``logits_CV`` has the peaks at 0."""
    values_CV, ids_CV = logits_CV.sort(dim=1, descending=True, stable=True)
    place_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    kept_CV = (place_V < top_k_C1) & values_CV.isfinite()
    mass_CV = torch.exp(values_CV.double()) * kept_CV
    total_C1 = mass_CV.sum(dim=1, keepdim=True)
    # A token stays while the mass before it is short of top_p: the smallest set that reaches it.
    before_CV = (mass_CV.cumsum(dim=1) - mass_CV) / total_C1
    kept_CV &= (before_CV < top_p_C1) | (top_p_C1 >= 1.0) | (place_V == 0)
    if typical:
        kept_CV &= _typical(values_CV, kept_CV, typical_p_C1) | (typical_p_C1 >= 1.0)
    values_CV = values_CV.masked_fill(~kept_CV, -math.inf)
    return torch.empty_like(logits_CV).scatter_(1, ids_CV, values_CV)


def _typical(values_CV: Tensor, kept_CV: Tensor, typical_p_C1: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al. 2022): tokens whose surprise is nearest to the entropy, up to the mass."""
    logprobs_CV = values_CV.double().masked_fill(~kept_CV, -math.inf).log_softmax(dim=1)
    mass_CV = logprobs_CV.exp()
    entropy_C1 = -(mass_CV * logprobs_CV.masked_fill(~kept_CV, 0.0)).sum(dim=1, keepdim=True)
    order_CV = (-logprobs_CV - entropy_C1).abs().argsort(dim=1, stable=True)
    mass_CV = mass_CV.gather(1, order_CV)
    place_V = torch.arange(values_CV.shape[1], device=values_CV.device)
    near_CV = (mass_CV.cumsum(dim=1) - mass_CV < typical_p_C1) | (place_V == 0)
    return torch.empty_like(near_CV).scatter_(1, order_CV, near_CV)
