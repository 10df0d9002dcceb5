"""The kernels that choose tokens, on rows as long as real vocabularies: they are gone through by stretches."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from serve.types import SamplingParams
from serve.worker.sampling.backend import TorchSampling, penalise
from serve.worker.sampling.native import NativeSampling
from serve.worker.sampling.seen import Seen
from tests.support.kernels import LEVELS, kernels_of

STRETCH = 8192
VOCABULARY = 3 * STRETCH + 71
"""Whole stretches, a whole chunk and a part of one."""
EDGES = (0, 63, 64, STRETCH - 1, STRETCH, 2 * STRETCH - 1, 3 * STRETCH, VOCABULARY - 1)
LIKELIEST = 40


def _seen(prompt: list[int], output: list[int]) -> Seen:
    seen = Seen()
    seen.follow(prompt + output, len(prompt))
    return seen


def _rows(source: random.Random, rows: int) -> tuple[Tensor, list[SamplingParams], list[Seen | None], list[float]]:
    """Rows of logits and what is asked of them; the likeliest tokens of a row are among those it has seen, or are not.

    Penalties are sums of few powers of two and so are most logits: nothing is rounded in which two ways may differ.
    """
    generator = torch.Generator().manual_seed(source.randrange(2**31))
    logits_RV = torch.randint(-4096, 4096, (rows, VOCABULARY), generator=generator) / 1024
    params, seen = [], []
    for logits_V in logits_RV:
        best = logits_V.topk(LIKELIEST).indices.tolist()
        known = source.sample(range(VOCABULARY), source.choice([0, 1, 2, 5, 700])) + source.sample(
            best, source.randrange(LIKELIEST)
        )
        known += source.sample(EDGES, source.randrange(len(EDGES)))
        if source.random() < 0.3:
            known = best[: source.randint(1, 3)]
        half = len(known) // 2
        seen.append(_seen(known[:half], known[half:] * source.randint(1, 3)) if source.random() < 0.8 else None)
        params.append(
            SamplingParams(
                temperature=source.choice([0.0, 0.0, 0.5, 2.0]),
                top_k=source.choice([0, 0, 1, 50]),
                top_p=source.choice([1.0, 0.5]),
                repetition_penalty=source.choice([1.0, 0.5, 2.0, 4.0]),
                presence_penalty=source.choice([0.0, 0.0, 1.5, -1.5]),
                frequency_penalty=source.choice([0.0, 0.0, 0.25, -0.25]),
            )
        )
    return logits_RV, params, seen, [source.random() for _ in range(rows)]


@pytest.mark.parametrize("level", LEVELS)
def test_long_rows_are_penalised_and_chosen_from_as_torch_does(level: str) -> None:
    ours = NativeSampling(kernels_of(level))
    logits_RV, params, seen, uniform = _rows(random.Random(0), 200)
    expected_RV, got_RV = logits_RV.clone(), logits_RV.clone()
    expected = TorchSampling().choose(expected_RV, params, uniform, seen)
    got = ours.choose(got_RV, params, uniform, seen)
    assert torch.equal(got_RV, expected_RV)
    assert torch.equal(got.raw_peaks_R, logits_RV.amax(dim=1))
    assert torch.equal(got.peaks_R, got_RV.amax(dim=1))
    assert got.tokens_R.tolist() == expected.tokens_R.tolist()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("place", [0, 20, 40, STRETCH - 1, STRETCH, 3 * STRETCH + 70, VOCABULARY - 1])
@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_told_of_wherever_the_number_stands(level: str, place: int, bad: float, top_k: int) -> None:
    """Penalised or not, and among what was seen or not."""
    params = [SamplingParams(repetition_penalty=2.0, temperature=warm, top_k=top_k) for warm in (0.0, 1.0)] * 2
    logits_RV = torch.zeros(4, VOCABULARY)
    logits_RV[:, place] = bad
    choice = NativeSampling(kernels_of(level)).choose(
        logits_RV, params, [0.5] * 4, [_seen([place], []), _seen([7], []), None, None]
    )
    assert not choice.raw_peaks_R.isfinite().any()
    assert not choice.peaks_R.isfinite().any()
    assert all(0 <= token < VOCABULARY for token in choice.tokens_R.tolist())


@pytest.mark.parametrize("level", LEVELS)
def test_a_peak_that_penalties_make_infinite_was_finite_as_it_came(level: str) -> None:
    logits_RV = torch.zeros(1, VOCABULARY)
    logits_RV[0, STRETCH] = 3e38
    params, seen = [SamplingParams(repetition_penalty=0.5, temperature=1.0)], [_seen([STRETCH], [])]
    choice = NativeSampling(kernels_of(level)).choose(logits_RV, params, [0.5], seen)
    assert choice.raw_peaks_R.item() == torch.tensor(3e38)
    assert choice.peaks_R.item() == math.inf


def test_the_reference_of_this_file_penalises() -> None:
    logits_RV, params, seen, _ = _rows(random.Random(1), 50)
    before_RV = logits_RV.clone()
    assert penalise(logits_RV, params, seen)
    assert (logits_RV != before_RV).any(dim=1).sum() > 20
    assert (logits_RV.argmax(dim=1) != before_RV.argmax(dim=1)).sum() > 10
