"""Chooses tokens from logits: every request by its own parameters, all rows of a step together.

Shapes.  R rows (sequences to sample)   V vocabulary

Randomness is a counter, not a stream: the draw for a token is a hash of (seed, sequence index, output position), so what a
request gets does not depend on its neighbours, on preemption or on chunking.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from serve.engine.plan import Sampled, SequenceFault
from serve.model.sending import send
from serve.types import SamplingParams, SequenceId
from serve.worker.sampling.answers import LaunchedPrompt, LaunchedTokens, SampledSequence
from serve.worker.sampling.backend import SamplingBackend, TorchSampling
from serve.worker.sampling.logprobs import LaunchedLogprobs, logprobs_of
from serve.worker.sampling.native import NativeSampling


def choose_sampling(device: torch.device, kernels: ctypes.CDLL | None) -> SamplingBackend:
    """What samples on this device: the CPU's kernels where there are some, else torch."""
    return NativeSampling(kernels) if device.type == "cpu" and kernels is not None else TorchSampling()


def sample(
    logits_RV: Tensor, states: Sequence[SampledSequence], backend: SamplingBackend
) -> tuple[list[Sampled], list[SequenceFault]]:
    """Choose the next token of each row, and wait for it: see ``launch_sampling``."""
    return launch_sampling(logits_RV, states, backend).read()


def launch_sampling(
    logits_RV: Tensor, states: Sequence[SampledSequence], backend: SamplingBackend, last_R: Tensor | None = None
) -> LaunchedTokens:
    """Choose the next token of each row; the host waits for nothing.

    Rows that suppose a token count up to the first that was not chosen, or has a fault: what is chosen is what would be if
    each of them came in a step of its own. Such a row's fault comes in the next step, when it supposes nothing.

    ``logits_RV`` may be changed in place.

    Args:
        last_R: each row's last token, int64 on the device, where there are some that the host has not read.
    """
    logits_RV = logits_RV.float().contiguous()
    params = [state.start.sampling for state in states]
    wanted = [row for row, state in enumerate(states) if state.start.logprobs is not None]
    wanted_W = send(torch.tensor(wanted), logits_RV.device) if wanted else None
    raw_WV = None if wanted_W is None else logits_RV[wanted_W]
    adjusted_from_R = adjust(logits_RV, states, backend)
    seen = [state.seen() if _penalises(p) else None for state, p in zip(states, params, strict=True)]
    if any(seen) or any(p.temperature > 0 for p in params):
        uniform = [uniform_of(p.seed, state) if p.temperature > 0 else 0.0 for p, state in zip(params, states, strict=True)]
        unread = [one is not None and not state.is_read for one, state in zip(seen, states, strict=True)]
        unread_R: Tensor | None = None
        if any(unread):
            assert last_R is not None, "somebody knows the last tokens"
            unread_R = torch.where(send(torch.tensor(unread), logits_RV.device), last_R, -1)
        raw_peaks_R, peaks_R, tokens_R = backend.choose(logits_RV, params, uniform, seen, unread_R)
    else:
        raw_peaks_R, tokens_R = peaks_R, _ = backend.peaks(logits_RV)
    if adjusted_from_R is not None:
        raw_peaks_R = adjusted_from_R
    launched: LaunchedLogprobs | None = None
    if raw_WV is not None and wanted_W is not None:
        num_top = [states[row].start.logprobs or 0 for row in wanted]
        launched = logprobs_of(raw_WV, tokens_R[wanted_W], num_top)
    chosen_3R = torch.stack((tokens_R, raw_peaks_R.isfinite(), peaks_R.isfinite()))
    return LaunchedTokens(chosen_3R, states, range(len(states)), launched)


def wants_likeliest(states: Sequence[SampledSequence]) -> bool:
    """Whether every row wants the likeliest token and nothing else: then its largest logit is all there is to know of it."""
    return not any(
        state.start.logprobs is not None
        or state.start.sampling.temperature > 0
        or _penalises(state.start.sampling)
        or _prefers(state)
        for state in states
    )


def first_columns(widths: Sequence[int], device: torch.device) -> Tensor:
    """Each rank's first column of the logits, int64 [ranks]: ``begins_S`` of ``likeliest``."""
    widths_S = torch.tensor(widths)
    return send(widths_S.cumsum(dim=0) - widths_S, device)


def likeliest(parts_RX: Tensor, begins_S: Tensor) -> Tensor:
    """Each row's likeliest token, of what each rank has found in its own columns of the logits. May be captured.

    Args:
        parts_RX: fp32 [R, 2 * ranks], of each rank its largest logit and the place of it, as ``peaks`` gives them.
        begins_S: int64, each rank's first column, on the same device.

    Returns:
        int64 [2, R] as ``LaunchedTokens`` takes it: of each row the token, and whether its logit is finite.
    """
    peaks_RS, places_RS = parts_RX.view(-1, len(begins_S), 2).unbind(dim=2)
    peaks_R = peaks_RS.amax(dim=1)  # NaN where one is NaN
    first_R = (peaks_RS == peaks_R[:, None]).int().argmax(dim=1)
    tokens_R = places_RS.gather(1, first_R[:, None])[:, 0].long() + begins_S[first_R]
    return torch.stack((tokens_R, peaks_R.isfinite()))


def prompt_logprobs(
    logits_RV: Tensor, sequence: SequenceId, first: int, targets: Sequence[int], num_top: int
) -> LaunchedPrompt:
    """Logprobs of the tokens that follow R neighbouring prompt positions; the host waits for nothing.

    Args:
        first: the position of the first target.
        targets: the tokens that follow.
    """
    targets_R = send(torch.tensor(targets), logits_RV.device)
    return LaunchedPrompt(sequence, first, logprobs_of(logits_RV.float(), targets_R, [num_top] * len(targets)))


def _penalises(params: SamplingParams) -> bool:
    """Whether a token's chance depends on which tokens came before."""
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def _must_go_on(state: SampledSequence) -> bool:
    return bool(state.start.end_ids) and state.num_output_tokens < state.start.min_new_tokens


def _prefers(state: SampledSequence) -> bool:
    """Whether ``adjust`` changes anything in the row."""
    params = state.start.sampling
    return bool(params.allowed_ids or params.banned_ids or params.logit_bias) or _must_go_on(state)


def adjust(logits_RV: Tensor, states: Sequence[SampledSequence], backend: SamplingBackend) -> Tensor | None:
    """Apply what requests allow, forbid and prefer in their own rows, before penalties and temperature.

    Returns:
        The peaks of all rows before, fp32 [R]; ``None`` if nobody wants anything, and nothing was changed.
    """
    allowed: list[tuple[int, int]] = []
    banned: list[tuple[int, int]] = []
    biased: list[tuple[int, int, float]] = []
    for row, state in enumerate(states):
        start, params = state.start, state.start.sampling
        allowed.extend((row, i) for i in params.allowed_ids)
        banned.extend((row, i) for i in params.banned_ids)
        if _must_go_on(state):
            banned.extend((row, i) for i in start.end_ids)
        biased.extend((row, i, value) for i, value in params.logit_bias)
    if not (allowed or banned or biased):
        return None
    peaks_R, _ = backend.peaks(logits_RV)
    device = logits_RV.device
    if allowed:
        rows_M, ids_M = send(torch.tensor(allowed), device).unbind(dim=1)
        kept_M = logits_RV[rows_M, ids_M]
        logits_RV[rows_M] = -math.inf
        logits_RV[rows_M, ids_M] = kept_M
    if banned:
        rows_M, ids_M = send(torch.tensor(banned), device).unbind(dim=1)
        logits_RV[rows_M, ids_M] = -math.inf
    if biased:
        rows, ids, values = zip(*biased, strict=True)
        places = send(torch.tensor(rows), device), send(torch.tensor(ids), device)
        logits_RV[places] += send(torch.tensor(values, dtype=logits_RV.dtype), device)
    return peaks_R


def uniform_of(seed: int, state: SampledSequence) -> float:
    """A number in [0, 1) that depends on the request's seed, the sequence's index and its next output position alone."""
    digest = hashlib.blake2b(
        seed.to_bytes(8, "little") + state.start.index.to_bytes(4, "little") + state.num_output_tokens.to_bytes(8, "little"),
        digest_size=8,
        person=b"tessera",
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
