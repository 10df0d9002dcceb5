"""The arithmetic of sampling, for all rows of a step at once: in torch, on any device. ``native`` has it for the CPU.

Shapes.  R rows of logits   N of them that a call is about   V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from serve.model.sending import send
from serve.types import SamplingParams
from serve.worker.sampling.seen import Seen


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
    ) -> Choice:
        """A token for each row.

        What it has ``seen`` is changed by its repetition, presence and frequency penalties. Then it is the likeliest where its
        temperature is 0. Else temperature, min-p, top-k, top-p and typical-p are applied, in this order, and it is the one at
        which the mass of those that are left, by their ids, passes ``uniform`` of it.

        ``logits_RV`` may be changed in place. Rows whose peak is not finite get some token or other.
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


class TorchSampling:
    """The reference: every device."""

    def peaks(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """See ``SamplingBackend``."""
        peaks_R, places_R = logits_RV.max(dim=1)
        return peaks_R, places_R

    def choose(
        self,
        logits_RV: Tensor,
        params: Sequence[SamplingParams],
        uniform: Sequence[float],
        seen: Sequence[Seen | None],
    ) -> Choice:
        """See ``SamplingBackend``."""
        raw_peaks_R, tokens_R = peaks_R, _ = self.peaks(logits_RV)
        penalised = {row: each for row, each in enumerate(seen) if each is not None}
        if penalised:
            self._penalise(logits_RV, list(penalised), [params[row] for row in penalised], list(penalised.values()))
            peaks_R, tokens_R = self.peaks(logits_RV)
        draws = [row for row, p in enumerate(params) if p.temperature > 0]
        if draws:
            drawn_N = self._draw(logits_RV, draws, [params[row] for row in draws], [uniform[row] for row in draws])
            tokens_R[send(torch.tensor(draws), tokens_R.device)] = drawn_N
        return Choice(raw_peaks_R, peaks_R, tokens_R)

    def _penalise(self, logits_RV: Tensor, rows: Sequence[int], params: Sequence[SamplingParams], seen: Sequence[Seen]) -> None:
        """Change what each of N rows has seen, in place."""
        device = logits_RV.device
        lengths = [len(s.ids) for s in seen]

        def spread(values: Sequence[float]) -> Tensor:
            return send(torch.from_numpy(np.repeat(values, lengths)), device)

        row_M = spread(rows)
        id_M = send(torch.cat([torch.frombuffer(s.ids, dtype=torch.int32) for s in seen]).long(), device)
        times_M = send(torch.cat([torch.frombuffer(s.times, dtype=torch.int32) for s in seen]).float(), device)
        again_M = spread([p.repetition_penalty for p in params]).float()
        value_M = logits_RV[row_M, id_M]
        value_M = torch.where(value_M > 0, value_M / again_M, value_M * again_M)
        presence_M, frequency_M = spread([p.presence_penalty for p in params]), spread([p.frequency_penalty for p in params])
        minus_M = presence_M.float() + frequency_M.float() * times_M
        logits_RV[row_M, id_M] = value_M - torch.where(times_M > 0, minus_M, 0.0)

    def _draw(
        self, logits_RV: Tensor, rows: Sequence[int], params: Sequence[SamplingParams], uniform: Sequence[float]
    ) -> Tensor:
        """A token for each of N rows, int64 [N]."""
        device = logits_RV.device
        temperature_N = send(torch.tensor([p.temperature for p in params], dtype=torch.float32), device)
        logits_NV = logits_RV[send(torch.tensor(rows), device)]
        # Shift before dividing: a tiny temperature then sends everything but the peak to -inf instead of overflowing.
        logits_NV = (logits_NV - logits_NV.max(dim=1, keepdim=True).values) / temperature_N[:, None]
        floor_N = send(torch.tensor([floor_of(p) for p in params], dtype=torch.float32), device)
        logits_NV.masked_fill_(logits_NV < floor_N[:, None], -math.inf)
        cut = [n for n, p in enumerate(params) if p.top_k or p.top_p < 1.0 or p.typical_p < 1.0]
        if cut:
            which_C = send(torch.tensor(cut), device)
            logits_NV[which_C] = _truncated(logits_NV[which_C], [params[n] for n in cut])
        mass_NV = torch.exp(logits_NV).double().cumsum(dim=1)
        total_N1 = mass_NV[:, -1:].contiguous()
        target_N1 = send(torch.tensor(uniform, dtype=torch.float64), device)[:, None] * total_N1
        chosen_N = torch.searchsorted(mass_NV, target_N1, right=True).squeeze(1)
        # u * total may round up to the total, one past the last token with any mass.
        last_N = torch.searchsorted(mass_NV, total_N1).squeeze(1)
        return torch.minimum(chosen_N, last_N).clamp_(max=logits_NV.shape[1] - 1)


def floor_of(params: SamplingParams) -> float:
    """The logit, with the peak at 0 and the temperature applied, below which min-p drops a token."""
    return math.log(params.min_p) if params.min_p > 0.0 else -math.inf


def _truncated(logits_CV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Top-k, then top-p, then typical-p: what is cut is -inf. ``logits_CV`` has the peaks at 0."""
    vocabulary = logits_CV.shape[1]

    def column(values: Sequence[float]) -> Tensor:
        return send(torch.tensor(values, dtype=torch.float64), logits_CV.device)[:, None]

    top_k_C1 = column([min(p.top_k, vocabulary) if p.top_k else vocabulary for p in params])
    top_p_C1 = column([p.top_p for p in params])
    values_CV, ids_CV = logits_CV.sort(dim=1, descending=True, stable=True)
    place_V = torch.arange(vocabulary, device=logits_CV.device)
    kept_CV = (place_V < top_k_C1) & values_CV.isfinite()
    mass_CV = torch.exp(values_CV.double()) * kept_CV
    total_C1 = mass_CV.sum(dim=1, keepdim=True)
    # A token stays while the mass before it is short of top_p: the smallest set that reaches it.
    before_CV = (mass_CV.cumsum(dim=1) - mass_CV) / total_C1
    kept_CV &= (before_CV < top_p_C1) | (top_p_C1 >= 1.0) | (place_V == 0)
    typical_p = [p.typical_p for p in params]
    if min(typical_p) < 1.0:
        kept_CV &= _typical(values_CV, kept_CV, column(typical_p))
    values_CV = values_CV.masked_fill(~kept_CV, -math.inf)
    return torch.empty_like(logits_CV).scatter_(1, ids_CV, values_CV)


def _typical(values_CV: Tensor, kept_CV: Tensor, typical_p_C1: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al. 2022): tokens whose surprise is nearest to the entropy, up to the mass."""
    logprobs_CV = values_CV.double().masked_fill(~kept_CV, -math.inf).log_softmax(dim=1)
    mass_CV = logprobs_CV.exp()
    entropy_C1 = -(mass_CV * logprobs_CV.masked_fill(~kept_CV, 0.0)).sum(dim=1, keepdim=True)
    order_CV = (-logprobs_CV - entropy_C1).abs().argsort(dim=1, stable=True)
    mass_CV = mass_CV.gather(1, order_CV)
    near_CV = mass_CV.cumsum(dim=1) - mass_CV < typical_p_C1
    near_CV[:, 0] = True
    return torch.empty_like(near_CV).scatter_(1, order_CV, near_CV) | (typical_p_C1 >= 1.0)
