"""Rows of a step that are sampled together: what ranks exchange of the likeliest tokens, the distribution of guessed ones."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from serve.worker.batch import SequenceState, Supposed
from serve.worker.sampling.answers import LaunchedTokens
from serve.worker.sampling.backend import SamplingBackend, TorchSampling
from serve.worker.sampling.native import NativeSampling
from serve.worker.sampling.sampler import first_columns, likeliest, sample, wants_likeliest
from tests.serve.worker.test_sampler import _state as state
from tests.support.kernels import cpu_kernels


@pytest.fixture(params=["torch", "kernel"])
def backend(request: pytest.FixtureRequest) -> SamplingBackend:
    return NativeSampling(cpu_kernels()) if request.param == "kernel" else TorchSampling()


@pytest.mark.parametrize("widths", [(7, 7), (8, 7), (5, 5, 4), (4, 4, 4, 3), (1, 1)])
def test_the_likeliest_of_all_ranks_is_the_likeliest_of_all_columns(backend: SamplingBackend, widths: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(sum(widths))
    for _ in range(60):
        # Few different numbers: ties within a rank's columns and between ranks; now and then what is no number.
        logits = torch.randint(-2, 3, (6, sum(widths)), generator=generator).float()
        for value in (math.nan, math.inf, -math.inf):
            logits[torch.rand(logits.shape, generator=generator) < 0.02] = value
        states: list[SequenceState | Supposed] = [state(sequence=row) for row in range(5)]
        states.append(Supposed(states[4], (int(torch.randint(0, 4, (), generator=generator)),)))
        assert wants_likeliest(states)
        parts = [torch.stack([*backend.peaks(part.contiguous())], dim=1).float() for part in logits.split(widths, dim=1)]
        found = likeliest(torch.cat(parts, dim=1), first_columns(widths, torch.device("cpu")))
        assert LaunchedTokens(found, states, range(len(states))).read() == sample(logits, states, backend)


@pytest.mark.parametrize(
    "wish",
    [
        {"temperature": 0.5}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1},
        {"logprobs": 0}, {"allowed_ids": (1,)}, {"banned_ids": (1,)}, {"logit_bias": ((1, 2.0),)},
        {"min_new_tokens": 1, "end_ids": (3,)},
    ],
)  # fmt: skip
def test_whoever_wants_more_than_the_likeliest_gets_all_logits_looked_at(wish: dict[str, Any]) -> None:
    assert not wants_likeliest([state(), state(**wish)])
    assert wants_likeliest([state(), state(min_new_tokens=1), state(end_ids=(3,))])


def chi_square_limit(degrees: int) -> float:
    """What the statistic exceeds once in a million times, by Wilson and Hilferty."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 4.7534 * math.sqrt(part)) ** 3


def test_fifty_thousand_draws_with_guessed_tokens_have_the_distribution_of_the_model(backend: SamplingBackend) -> None:
    generator, draws, vocabulary, guess = torch.Generator().manual_seed(11), 50_000, 24, 3
    rows_2V = torch.randn(2, vocabulary, generator=generator)
    rows_2V[0, guess] = 2.5
    counts = [Counter[int](), Counter[int]()]
    for begin in range(0, draws, 5000):
        states: list[SequenceState | Supposed] = []
        for seed in range(begin, begin + 5000):
            live = state(sequence=seed, seed=seed, temperature=1.0)
            states += [live, Supposed(live, (guess,))]
        drawn, faults = sample(rows_2V.repeat(5000, 1), states, backend)
        assert not faults
        given = Counter[int]()
        for answer in drawn:
            counts[given[answer.sequence]][answer.token_id] += 1
            given[answer.sequence] += 1
    assert counts[0].total() == draws
    assert counts[1].total() == counts[0][guess] > 5000, "the guess was right in some of the draws, and only then another came"
    for row, count in enumerate(counts):
        expected_V = rows_2V[row].double().softmax(0) * count.total()
        found_V = torch.tensor([count[token] for token in range(vocabulary)], dtype=torch.float64)
        assert float(((found_V - expected_V) ** 2 / expected_V).sum()) < chi_square_limit(vocabulary - 1)
