"""Draws that are replayed, beside the reference that sorts row by row; and which part of sampling a captured step has."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serve.engine.plan import StepResult
from serve.errors import StartError
from serve.model.cuda.graphs import CaptureError, CpuGraph, graphs_of
from serve.types import SamplingParams, SequenceId
from serve.worker.batch import SequenceState
from serve.worker.runner import Runner
from serve.worker.sampling.backend import Choice, Manner, TorchSampling, manner_of
from serve.worker.sampling.captured import MOST_SEEN, CapturedSampling
from serve.worker.sampling.sampler import sample
from serve.worker.sampling.seen import Seen
from tests.serve.worker import reference_sampler
from tests.serve.worker.captured import load_captured
from tests.serve.worker.test_decode_graphs import ALONE, decode_plan, saved
from tests.serve.worker.test_sampler import VOCABULARY, _logits, _random_params, _state
from tests.serve.worker.waits import META, OnlyDevice

ROWS = 160
"""More than are drawn at once."""


@pytest.fixture(autouse=True)
def _one_thread_without_gradients() -> Iterator[None]:
    torch.set_num_threads(1)
    with torch.no_grad():
        yield


def captured(rows: int, vocabulary: int) -> CapturedSampling:
    sampling = CapturedSampling(torch.zeros(rows, vocabulary))
    sampling.capture(graphs_of(torch.device("cpu")))
    return sampling


def random_states(draw: random.Random, rows: int) -> list[SequenceState]:
    states = [_state(**_random_params(draw)) for _ in range(rows)]
    return [
        dataclasses.replace(state, start=dataclasses.replace(state.start, sequence=SequenceId(row)))
        for row, state in enumerate(states)
    ]


def test_every_replayed_token_is_the_one_that_sorting_row_by_row_gives() -> None:
    """One capture, replayed for other logits and other requests, with rows of no sequence behind them."""
    draw, sampling = random.Random("replayed"), captured(ROWS, VOCABULARY)
    for seed, (rows, spread) in enumerate(((ROWS, 0.3), (90, 6.0), (3, 2.0), (1, 1.0))):
        states, logits = random_states(draw, rows), _logits(rows, seed=seed, spread=spread)
        logits[rows // 2, 5] = float("nan") if rows > 3 else 1.0
        expected, expected_faults = reference_sampler.sample(logits.clone(), states)
        sampling.logits_TV[:rows] = logits
        got, faults = sample(sampling.logits_TV[:rows], states, sampling)
        assert [(s.sequence, s.token_id) for s in got] == [(s.sequence, s.token_id) for s in expected]
        assert faults == expected_faults
        sampling.logits_TV[:rows] = logits
        assert (got, faults) == sample(logits, states, TorchSampling()), "and logprobs, bit for bit"


def test_the_least_manner_that_does_what_is_asked_draws_the_same_token_as_all_that_do_more() -> None:
    sampling = captured(40, 300)
    sampling.logits_TV.copy_(torch.randn(40, 300, generator=torch.Generator().manual_seed(4)) * 3)
    numbers = torch.tensor([[0.9, -4.0, 300, 1.0, 1.0, row / 40] for row in range(40)], dtype=torch.float64)
    sampling._numbers_6T.copy_(numbers.t())
    tokens = [sampling.draw(manner).tokens_R.tolist() for manner in Manner]
    assert tokens[0] == tokens[1] == tokens[2]
    assert len(set(tokens[0])) > 10
    wishes = ({}, {"min_p": 0.1}, {"top_k": 3}, {"top_p": 0.9}, {"typical_p": 0.9, "top_k": 3})
    assert [manner_of(SamplingParams(temperature=1.0, **wish)) for wish in wishes] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("most", [MOST_SEEN, 3])
def test_replayed_penalties_change_what_was_seen_as_they_ever_do(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, whether there is room for what was seen or not."""
    monkeypatch.setattr("serve.worker.sampling.captured.MOST_SEEN", most)
    draw, rows = random.Random(9), 30
    sampling, penalty = captured(rows, VOCABULARY), SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2)
    for _ in range(3):
        ids = [tuple(draw.choices(range(VOCABULARY), k=draw.randint(1, 400))) for _ in range(rows)]
        states = [_state(prompt=each, output=each[:50]) for each in ids]
        seen = [state.seen() if row % 3 else None for row, state in enumerate(states)]
        params = [penalty if each is not None else SamplingParams() for each in seen]
        logits = _logits(rows, seed=draw.randrange(99), spread=1.0)
        sampling.logits_TV.copy_(logits)
        found = sampling.choose(sampling.logits_TV, params, [0.0] * rows, seen)
        expected = TorchSampling().choose(logits, params, [0.0] * rows, seen)
        assert torch.equal(sampling.logits_TV, logits)
        assert all(map(torch.equal, found, expected))


def test_neither_do_penalties_copy_anything_between_host_and_device() -> None:
    sampling = CapturedSampling(torch.empty(100, 50, device=META))
    with OnlyDevice() as looked:
        sampling.penalise()
    assert looked.found == []


@pytest.mark.parametrize("manner", Manner)
def test_no_draw_copies_anything_between_host_and_device(manner: Manner) -> None:
    """On ``meta``, where a tensor has no numbers."""
    sampling = CapturedSampling(torch.empty(100, 50, device=META))
    with OnlyDevice() as looked:
        choice = sampling.draw(manner)
    assert looked.found == []
    assert choice.tokens_R.shape == (100,)


class _Forbidden(TorchSampling):
    """In the place of what samples where nothing is captured."""

    def peaks(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("peaks were looked for beside the captured step")

    def choose(
        self, logits_RV: Tensor, params: Sequence[SamplingParams], uniform: Sequence[float], seen: Sequence[Seen | None]
    ) -> Choice:
        raise AssertionError("tokens were drawn beside the captured step")


class _Launched(CpuGraph):
    """Counts replays."""

    count = 0

    def replay(self) -> None:
        _Launched.count += 1
        super().replay()


PLAIN = SamplingParams(temperature=0.8, min_p=0.01, seed=3)
CUT = SamplingParams(temperature=1.2, top_k=20, top_p=0.9, seed=4)
TYPICAL = SamplingParams(temperature=0.7, typical_p=0.8, repetition_penalty=1.2, presence_penalty=0.1, seed=5)
BIASED = SamplingParams(temperature=0.9, banned_ids=(3,), logit_bias=((7, 2.0),), seed=6)
GREEDY, PENALISED = SamplingParams(), SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5)


@pytest.mark.parametrize(
    ("wishes", "launches"),
    [
        ((GREEDY,) * 3, 1),
        ((PLAIN, GREEDY, PLAIN), 3),
        ((CUT, PLAIN, GREEDY), 3),
        ((TYPICAL, CUT, GREEDY), 4),
        ((PENALISED, GREEDY, GREEDY), 3),
        ((BIASED,) * 4, 3),
    ],
    ids=["greedy", "plain", "cut", "typical and penalised", "penalised", "biased"],
)
def test_what_is_asked_is_sampled_by_replays_alone(
    wishes: tuple[SamplingParams, ...], launches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.model.cuda.graphs.CpuGraph", _Launched)
    first, second = decode_plan(1, (5, 20, 33, 12)[: len(wishes)], wishes)
    results: list[StepResult | None] = []
    for replayed in (False, True):
        runner = Runner(load_captured(saved("llama", tmp_path / str(replayed)), ALONE), ALONE)
        assert runner.graphs is not None
        runner.execute(first)
        if replayed:
            runner.graphs.capture()
            runner._model = dataclasses.replace(runner._model, sampling=_Forbidden())
        _Launched.count = 0
        results.append(runner.execute(second))
        assert _Launched.count == (launches if replayed else 0), "step; all logits; penalties; draw"
    assert results[0] == results[1]
    assert results[1] is not None
    assert len(results[1].sampled) == len(wishes)


@pytest.mark.parametrize("told", [{"logprobs": 2}, {}], ids=["logprobs", "penalties"])
def test_what_no_graph_holds_is_done_after_it_with_the_same_answer(told: dict[str, Any], tmp_path: Path) -> None:
    model, results = load_captured(saved("llama", tmp_path), ALONE), []
    first, second = decode_plan(1, (5, 20, 33, 12), (PENALISED, GREEDY, CUT, TYPICAL))
    first = dataclasses.replace(first, starts=tuple(dataclasses.replace(start, **told) for start in first.starts))
    for replayed in (False, True):
        runner = Runner(model, ALONE)
        assert runner.graphs is not None
        if replayed:
            runner.graphs.capture()
        runner.execute(first)
        results.append(runner.execute(second))
    assert results[0] == results[1]
    assert results[0] is not None
    assert all((answer.logprob is not None) == bool(told) for answer in results[0].sampled)


def test_a_draw_that_cannot_be_captured_is_told_as_a_step_that_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves of a device's pool lets no other capture begin, so that nothing goes on without it."""

    def capture(*_: object) -> None:
        raise CaptureError("a sort waits for the device")

    graphs = Runner(load_captured(saved("llama", tmp_path), ALONE), ALONE).graphs
    assert graphs is not None
    monkeypatch.setattr(CapturedSampling, "capture", capture)
    with pytest.raises(
        StartError, match=r"a step of 4 rows cannot be captured: a sort waits for the device; --cuda-graphs off"
    ):
        graphs.capture()
