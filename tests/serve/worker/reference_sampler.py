"""The sampler as it was: row by row, by sorting. What ``serve.worker.sampling`` gives is compared with it.

Among equal logits the smaller id counts as the likelier; here torch's order, which is any,
decided. A top-k of the whole vocabulary or more cuts nothing; it cut all but 1024.

Shapes.  R rows (sequences to sample)   V vocabulary

Randomness is a counter, not a stream: the draw for a token is a hash of (seed, sequence index, output position), so what a
request gets does not depend on its neighbours, on preemption or on chunking.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from serve.engine.plan import PromptLogprobs, Sampled, SequenceFault
from serve.types import SamplingParams, SequenceId, TokenLogprob
from serve.worker.batch import SequenceState

_HEAD_FOR_TOP_P = 1024
"""Likeliest tokens looked at first when only top-p cuts; the whole vocabulary is sorted only if their mass is too small."""


def sample(logits_RV: Tensor, states: Sequence[SequenceState]) -> tuple[list[Sampled], list[SequenceFault]]:
    """Choose the next token of each row; rows whose logits are not finite, or where nothing is allowed, become faults.

    ``logits_RV`` is changed in place.
    """
    logits_RV = logits_RV.float()
    peaks_R, greedy_R = logits_RV.max(dim=1)
    finite = peaks_R.isfinite().tolist()
    raw_logprobs = {
        row: _Logprobs(logits_RV[row].clone())
        for row, state in enumerate(states)
        if state.start.logprobs is not None and finite[row]
    }
    changed = [row for row, state in enumerate(states) if finite[row] and _adjust(logits_RV[row], state)]
    if changed:
        peaks_R, greedy_R = logits_RV.max(dim=1)
    greedy, possible = greedy_R.tolist(), peaks_R.isfinite().tolist()
    drawn = _draw(
        logits_RV, [row for row, state in enumerate(states) if state.start.sampling.temperature > 0 and possible[row]], states
    )

    sampled: list[Sampled] = []
    faults: list[SequenceFault] = []
    for row, state in enumerate(states):
        sequence = state.start.sequence
        if not finite[row]:
            faults.append(_not_finite(sequence, len(state.token_ids)))
        elif not possible[row]:
            faults.append(
                SequenceFault(sequence=sequence, message="allowed_ids, banned_ids and min_new_tokens leave no token to sample")
            )
        else:
            token = drawn.get(row, greedy[row])
            wanted = state.start.logprobs
            logprob = raw_logprobs[row].of(token, wanted) if wanted is not None else None
            sampled.append(Sampled(sequence=sequence, token_id=token, logprob=logprob))
    return sampled, faults


class _Logprobs:
    """The model's own distribution of one row, before anything a request asks for changes it."""

    def __init__(self, logits_V: Tensor) -> None:
        self._logits_V = logits_V
        self._normaliser = float(torch.logsumexp(logits_V.double(), dim=0))

    def of(self, token: int, num_top: int) -> TokenLogprob:
        own = self._logits_V[token]
        rank = int((self._logits_V > own).sum()) + 1
        values, ids = self._logits_V.topk(min(num_top, self._logits_V.numel()))
        top = tuple((int(i), float(v) - self._normaliser) for i, v in zip(ids.tolist(), values.tolist(), strict=True))
        return TokenLogprob(token, float(own) - self._normaliser, rank, top)


def prompt_logprobs(
    logits_RV: Tensor, sequence: SequenceId, first: int, targets: Sequence[int], num_top: int
) -> PromptLogprobs | SequenceFault:
    """Logprobs of the tokens that follow R neighbouring prompt positions; ``first`` is the position of the first target.

    A fault where any of them would not be finite: NaN compares with nothing, so it would pass for the likeliest token.
    """
    logits_RV = logits_RV.float()
    logprobs = []
    for place, (row, target, peak) in enumerate(zip(logits_RV, targets, logits_RV.amax(dim=1).tolist(), strict=True)):
        logprob = _Logprobs(row).of(target, num_top) if math.isfinite(peak) else None
        if logprob is None or not math.isfinite(logprob.logprob):
            return _not_finite(sequence, first + place)
        logprobs.append(logprob)
    return PromptLogprobs(sequence=sequence, first=first, logprobs=tuple(logprobs))


def _not_finite(sequence: SequenceId, position: int) -> SequenceFault:
    message = f"the model's logits for position {position} are not finite; its weights or its data type are at fault"
    return SequenceFault(sequence=sequence, message=message, not_finite=True)


def _adjust(logits_V: Tensor, state: SequenceState) -> bool:
    """Apply what a request wants changed in its own row, before temperature; False if it wants nothing."""
    params, start = state.start.sampling, state.start
    changed = False
    if params.allowed_ids:
        allowed = torch.tensor(params.allowed_ids, device=logits_V.device)
        kept = logits_V[allowed].clone()
        logits_V.fill_(-math.inf)
        logits_V[allowed] = kept
        changed = True
    if params.banned_ids:
        logits_V[list(params.banned_ids)] = -math.inf
        changed = True
    if start.end_ids and state.num_output_tokens < start.min_new_tokens:
        logits_V[list(start.end_ids)] = -math.inf
        changed = True
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        logits_V[list(ids)] += torch.tensor(values, dtype=logits_V.dtype, device=logits_V.device)
        changed = True
    return _penalise(logits_V, params, state) or changed


def _penalise(logits_V: Tensor, params: SamplingParams, state: SequenceState) -> bool:
    changed = False
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(state.token_ids)), device=logits_V.device)
        values = logits_V[seen]
        logits_V[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        changed = True
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(state.token_ids[state.start.num_prompt_tokens :])
        if counts:
            ids = torch.tensor(list(counts), device=logits_V.device)
            times = torch.tensor(list(counts.values()), dtype=logits_V.dtype, device=logits_V.device)
            logits_V[ids] -= params.presence_penalty + params.frequency_penalty * times
            changed = True
    return changed


def _draw(logits_RV: Tensor, rows: list[int], states: Sequence[SequenceState]) -> dict[int, int]:
    """Sample the given rows at their temperatures; row -> token id."""
    if not rows:
        return {}
    params = [states[row].start.sampling for row in rows]
    temperature_N = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=logits_RV.device)
    logits_NV = logits_RV[rows]
    # Shift before dividing: a tiny temperature then sends everything but the peak to -inf instead of overflowing.
    logits_NV = (logits_NV - logits_NV.max(dim=1, keepdim=True).values) / temperature_N[:, None]
    for n, p in enumerate(params):
        if p.min_p > 0.0:
            logits_NV[n].masked_fill_(logits_NV[n] < math.log(p.min_p), -math.inf)
        if p.top_k or p.top_p < 1.0 or p.typical_p < 1.0:
            _truncate(logits_NV[n], p)
    mass_NV = torch.exp(logits_NV).double().cumsum(dim=1)
    uniform = [
        _uniform(p.seed, states[row].start.index, states[row].num_output_tokens) for p, row in zip(params, rows, strict=True)
    ]
    total_N1 = mass_NV[:, -1:].contiguous()
    target_N1 = torch.tensor(uniform, dtype=torch.float64, device=logits_RV.device)[:, None] * total_N1
    chosen_N = torch.searchsorted(mass_NV, target_N1, right=True).squeeze(1)
    # u * total may round up to the total, one past the last token with any mass.
    last_N = torch.searchsorted(mass_NV, total_N1).squeeze(1)
    return dict(zip(rows, torch.minimum(chosen_N, last_N).tolist(), strict=True))


def _truncate(logits_V: Tensor, params: SamplingParams) -> None:
    """Top-k, then top-p, then typical-p, in place: what is cut becomes -inf. ``logits_V`` has its peak at 0."""
    vocabulary = logits_V.numel()
    count = min(params.top_k, vocabulary) if params.top_k else vocabulary
    total = torch.exp(logits_V).sum(dtype=torch.float64) if count == vocabulary else None
    if total is not None and params.top_p < 1.0 and params.typical_p >= 1.0:
        count = min(_HEAD_FOR_TOP_P, vocabulary)
    values, ids = (part[:count] for part in logits_V.sort(descending=True, stable=True))
    mass = torch.exp(values.double())
    if params.top_p < 1.0:
        share = mass.cumsum(dim=0) / (total if total is not None else mass.sum())
        if total is not None and count < vocabulary and float(share[-1]) < params.top_p:
            values, ids = logits_V.sort(descending=True, stable=True)
            mass = torch.exp(values.double())
            share = mass.cumsum(dim=0) / total
        # A token stays while the mass before it is short of top_p: the smallest set that reaches it.
        keep = (share - mass / (total if total is not None else mass.sum())) < params.top_p
        keep[0] = True
        values, ids = values[keep], ids[keep]
    if params.typical_p < 1.0:
        values, ids = _typical(values, ids, params.typical_p)
    kept = logits_V[ids].clone()
    logits_V.fill_(-math.inf)
    logits_V[ids] = kept


def _typical(values: Tensor, ids: Tensor, typical_p: float) -> tuple[Tensor, Tensor]:
    """Locally typical sampling (Meister et al. 2022): tokens whose surprise is nearest to the entropy, up to the mass."""
    present = values.isfinite()
    values, ids = values[present], ids[present]
    logprobs = torch.log_softmax(values.double(), dim=0)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs).sum()
    order = (-logprobs - entropy).abs().argsort(stable=True)
    before = probabilities[order].cumsum(dim=0) - probabilities[order]
    keep = before < typical_p
    keep[0] = True
    chosen = order[keep]
    return values[chosen], ids[chosen]


def _uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone."""
    digest = hashlib.blake2b(
        seed.to_bytes(8, "little") + index.to_bytes(4, "little") + position.to_bytes(8, "little"),
        digest_size=8,
        person=b"tessera",
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
