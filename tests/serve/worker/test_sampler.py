"""Sampling against what each parameter is defined to do."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from serve.engine.plan import PromptLogprobs, Sampled, SequenceFault, Start
from serve.types import SamplingParams, SequenceId
from serve.worker.batch import SequenceState, Supposed
from serve.worker.sampling.backend import SamplingBackend, TorchSampling
from serve.worker.sampling.native import NativeSampling
from serve.worker.sampling.sampler import prompt_logprobs
from serve.worker.sampling.sampler import sample as sample_by
from tests.serve.worker import reference_sampler
from tests.support.kernels import cpu_kernels

VOCABULARY = 5000

Answer = tuple[list[Sampled], list[SequenceFault]]
_backend: SamplingBackend = TorchSampling()


@pytest.fixture(params=["torch", "kernel"], autouse=True)
def _each_backend(request: pytest.FixtureRequest) -> None:
    global _backend
    _backend = NativeSampling(cpu_kernels()) if request.param == "kernel" else TorchSampling()


def sample(logits: Tensor, states: Sequence[SequenceState | Supposed]) -> Answer:
    return sample_by(logits, states, _backend)


def _state(
    *,
    prompt: tuple[int, ...] = (1, 2),
    output: tuple[int, ...] = (),
    sequence: int = 0,
    index: int = 0,
    min_new_tokens: int = 0,
    end_ids: tuple[int, ...] = (),
    logprobs: int | None = None,
    **params: Any,
) -> SequenceState:
    start = Start(
        sequence=SequenceId(sequence),
        index=index,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(**params),
        min_new_tokens=min_new_tokens,
        end_ids=end_ids,
        logprobs=logprobs,
    )
    return SequenceState(start, [*prompt, *output])


def _logits(rows: int = 1, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread


def _draws(logits: Tensor, count: int, **params: Any) -> list[int]:
    """Tokens that ``count`` different output positions of one request would get from the same logits."""
    states = [_state(output=(0,) * position, **params) for position in range(count)]
    sampled, faults = sample(logits.expand(count, -1).clone(), states)
    assert not faults
    return [s.token_id for s in sampled]


def test_temperature_zero_takes_the_likeliest_token() -> None:
    logits = _logits(3)
    sampled, _ = sample(logits.clone(), [_state(sequence=i) for i in range(3)])
    assert [s.token_id for s in sampled] == logits.argmax(dim=1).tolist()


def test_draws_follow_the_distribution() -> None:
    logits = torch.full((1, VOCABULARY), -math.inf)
    logits[0, [3, 40, 4999]] = torch.tensor([0.5, 0.3, 0.2]).log()
    draws = _draws(logits, 4000, temperature=1.0, seed=7)
    for token, share in ((3, 0.5), (40, 0.3), (4999, 0.2)):
        assert abs(draws.count(token) / 4000 - share) < 0.03
    assert set(draws) == {3, 40, 4999}


def test_temperature_sharpens_and_flattens() -> None:
    logits = torch.full((1, VOCABULARY), -1000.0)
    logits[0, :2] = torch.tensor([1.0, 0.0])
    cold = _draws(logits, 1000, temperature=0.25, seed=1).count(0) / 1000
    hot = _draws(logits, 1000, temperature=4.0, seed=1).count(0) / 1000
    assert abs(cold - 1 / (1 + math.exp(-4))) < 0.03
    assert abs(hot - 1 / (1 + math.exp(-0.25))) < 0.05


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = _logits()
    draws = _draws(logits, 20, temperature=temperature, seed=3)
    if temperature < 1:
        assert set(draws) == {int(logits.argmax())}
    else:
        assert len(set(draws)) > 10


def _kept(logits: Tensor, **params: Any) -> set[int]:
    return set(_draws(logits, 3000, temperature=1.0, seed=5, **params))


def test_top_k_keeps_the_k_likeliest() -> None:
    logits = _logits(spread=0.1)
    assert _kept(logits, top_k=7) == set(logits[0].topk(7).indices.tolist())


@pytest.mark.parametrize("spread", [3.0, 0.01])
def test_top_p_keeps_the_smallest_set_that_reaches_it(spread: float) -> None:
    """A peaked distribution is cut within its head; a flat one needs the whole vocabulary sorted."""
    logits = _logits(spread=spread)
    order = logits[0].argsort(descending=True)
    mass = logits[0].softmax(dim=0)[order].cumsum(dim=0)
    count = int((mass < 0.6).sum()) + 1
    kept = _kept(logits, top_p=0.6)
    assert kept <= set(order[:count].tolist())
    if spread == 3.0:
        assert set(order[: max(1, count // 20)].tolist()) <= kept


def test_min_p_keeps_what_is_likely_enough() -> None:
    logits = _logits(spread=1.0)
    probabilities = logits[0].softmax(dim=0)
    allowed = set((probabilities >= 0.2 * probabilities.max()).nonzero().flatten().tolist())
    assert _kept(logits, min_p=0.2) <= allowed


def test_typical_p_keeps_what_surprises_as_much_as_expected() -> None:
    logits = torch.full((1, VOCABULARY), -math.inf)
    probabilities = torch.tensor([0.7, 0.15, 0.1, 0.05])
    logits[0, :4] = probabilities.log()
    entropy = -(probabilities * probabilities.log()).sum()
    order = (-probabilities.log() - entropy).abs().argsort()
    before = probabilities[order].cumsum(dim=0) - probabilities[order]
    expected = set(order[before < 0.2].tolist())
    assert _kept(logits, typical_p=0.2) == expected


def test_a_draw_does_not_depend_on_the_neighbours() -> None:
    logits = _logits(8, seed=9)
    states = [_state(sequence=i, temperature=0.9, top_p=0.9, seed=i * 11, output=(5,) * i) for i in range(8)]
    together, _ = sample(logits.clone(), states)
    alone = [sample(logits[i : i + 1].clone(), [states[i]])[0][0] for i in range(8)]
    assert [s.token_id for s in together] == [s.token_id for s in alone]


def test_sequences_of_one_request_and_other_seeds_draw_differently() -> None:
    logits = _logits(spread=0.1)

    def draw(**changes: Any) -> int:
        return sample(logits.clone(), [_state(temperature=1.0, **changes)])[0][0].token_id

    assert len({draw(index=i, seed=4) for i in range(8)}) > 4
    assert len({draw(seed=i) for i in range(8)}) > 4
    assert draw(seed=2**64 - 1) == draw(seed=2**64 - 1)


def test_repetition_penalty_falls_on_prompt_and_output() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [1, 9, 20]] = torch.tensor([2.0, 1.9, 1.5])
    [choice], _ = sample(logits.clone(), [_state(prompt=(1,), output=(9,), repetition_penalty=2.0)])
    assert choice.token_id == 20
    negative = torch.full((1, VOCABULARY), -1.0)
    [choice], _ = sample(negative, [_state(prompt=tuple(range(VOCABULARY - 1)), repetition_penalty=1.5)])
    assert choice.token_id == VOCABULARY - 1


def test_presence_and_frequency_penalties_fall_on_the_output_alone() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [1, 5, 6]] = torch.tensor([3.0, 3.5, 2.9])
    [presence], _ = sample(logits.clone(), [_state(prompt=(1,), output=(5, 5, 5), presence_penalty=0.4)])
    [frequency], _ = sample(logits.clone(), [_state(prompt=(1,), output=(5, 5, 5), frequency_penalty=0.4)])
    assert presence.token_id == 5
    assert frequency.token_id == 1


def test_bias_allowed_and_banned_ids() -> None:
    logits = _logits()
    best = int(logits.argmax())

    def choose(**params: Any) -> int:
        return sample(logits.clone(), [_state(**params)])[0][0].token_id

    assert choose(banned_ids=(best,)) == int(logits[0].topk(2).indices[1])
    assert choose(allowed_ids=(8, 30)) == max((8, 30), key=lambda i: float(logits[0, i]))
    assert choose(logit_bias=((77, 1000.0),)) == 77
    assert choose(logit_bias=((best, -1000.0),)) != best


def test_end_ids_wait_for_the_minimum() -> None:
    logits = _logits()
    best = int(logits.argmax())

    def choose(outputs: int) -> int:
        return sample(logits.clone(), [_state(output=(3,) * outputs, min_new_tokens=2, end_ids=(best,))])[0][0].token_id

    assert choose(1) != best
    assert choose(2) == best


def test_a_bad_row_is_a_fault_and_its_neighbours_are_not() -> None:
    logits = _logits(4)
    logits[1, 17] = math.nan
    logits[2, 3] = math.inf
    states = [_state(sequence=i) for i in range(3)] + [_state(sequence=3, allowed_ids=(4,), banned_ids=(4,))]
    sampled, faults = sample(logits.clone(), states)
    assert [s.sequence for s in sampled] == [0]
    assert {f.sequence: "finite" in f.message for f in faults} == {1: True, 2: True, 3: False}
    assert {f.sequence: f.not_finite for f in faults} == {1: True, 2: True, 3: False}


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 9, "repetition_penalty": 1.4, "frequency_penalty": 0.3}])
def test_rows_that_suppose_tokens_count_as_far_as_these_are_what_is_chosen(params: dict[str, Any]) -> None:
    logits = _logits(5)
    ids: tuple[int, ...] = ()
    for row in range(4):  # one token after the other
        [answer], _ = sample(logits[row : row + 1].clone(), [_state(output=ids, logprobs=1, **params)])
        ids = (*ids, answer.token_id)
    state = _state(logprobs=1, **params)
    other = _state(sequence=7)
    wrong = (ids[0] + 1) % VOCABULARY
    for proposed, expected in (
        (ids[:3], ids),
        ((*ids[:2], wrong), ids[:3]),
        ((wrong, *ids[1:3]), ids[:1]),
    ):
        rows = [state, *(Supposed(state, proposed[: count + 1]) for count in range(3)), other]
        sampled, faults = sample(logits.clone(), rows)
        assert tuple(s.token_id for s in sampled if s.sequence == 0) == expected
        assert [s.sequence for s in sampled[len(expected) :]] == [7]
        assert all(s.logprob is not None and s.logprob.token_id == s.token_id for s in sampled[: len(expected)])
        assert not faults
    assert state.num_output_tokens == 0


def test_a_row_that_supposes_a_token_keeps_its_fault_for_the_step_in_which_it_supposes_none() -> None:
    logits = _logits(3)
    first = int(logits[0].argmax())
    logits[1, 4] = math.nan
    state = _state()
    rows = [state, Supposed(state, (first,)), Supposed(state, (first, 5))]
    sampled, faults = sample(logits.clone(), rows)
    assert ([s.token_id for s in sampled], faults) == ([first], [])
    sampled, faults = sample(logits[1:].clone(), [state, Supposed(state, (0,))])
    assert (sampled, len(faults)) == ([], 1), "of a sequence with a fault nothing else is told"


def test_logprobs_are_the_models_own_whatever_is_asked_of_the_sampling() -> None:
    logits = _logits()
    reference = logits[0].double().log_softmax(dim=0)
    best = int(logits.argmax())
    [choice], _ = sample(
        logits.clone(), [_state(logprobs=3, banned_ids=(best,), temperature=0.7, top_k=1, presence_penalty=1.0)]
    )
    assert choice.logprob is not None
    assert choice.logprob.rank == 2
    assert choice.logprob.logprob == pytest.approx(float(reference[choice.token_id]), abs=1e-6)
    assert [i for i, _ in choice.logprob.top] == reference.topk(3).indices.tolist()
    assert [p for _, p in choice.logprob.top] == pytest.approx(reference.topk(3).values.tolist(), abs=1e-6)


def test_prompt_logprobs_name_their_targets() -> None:
    logits = _logits(3)
    result = prompt_logprobs(logits, SequenceId(5), 10, (7, 8, 9), 2).read()
    assert isinstance(result, PromptLogprobs)
    reference = logits.double().log_softmax(dim=1)
    assert (result.sequence, result.first) == (5, 10)
    for row, (target, entry) in enumerate(zip((7, 8, 9), result.logprobs, strict=True)):
        assert entry.token_id == target
        assert entry.logprob == pytest.approx(float(reference[row, target]), abs=1e-6)
        assert len(entry.top) == 2


@pytest.mark.parametrize(("place", "bad"), [(3, math.nan), (8, math.nan), (3, math.inf), (8, -math.inf)])
def test_prompt_logprobs_that_are_not_finite_are_a_fault_that_names_the_position(place: int, bad: float) -> None:
    logits = _logits(3)
    logits[1, place] = bad
    result = prompt_logprobs(logits, SequenceId(5), 10, (7, 8, 9), 2).read()
    assert isinstance(result, SequenceFault)
    assert result.not_finite
    assert "position 11" in result.message


def _random_params(draw: random.Random) -> dict[str, Any]:
    """What a request may ask for, any of it together with any other."""
    ids = draw.sample(range(VOCABULARY), 60)
    params: dict[str, Any] = {"seed": draw.getrandbits(64), "index": draw.randrange(4), "sequence": 0}
    params["prompt"] = tuple(draw.choices(range(VOCABULARY), k=draw.randint(1, 300)))
    params["output"] = tuple(draw.choices(params["prompt"] + tuple(range(50)), k=draw.randint(0, 200)))

    def perhaps(name: str, value: Any, share: float = 0.4) -> None:
        if draw.random() < share:
            params[name] = value

    perhaps("temperature", draw.choice([0.01, 0.3, 0.7, 1.0, 1.7, 20.0, 1e30]), 0.85)
    perhaps("top_k", draw.choice([1, 2, 20, 50, 100, 700, 4999, 5000, 9999]))
    perhaps("top_p", draw.choice([0.0, 0.05, 0.5, 0.9, 0.95, 0.999, 1.0 - 1e-9]))
    perhaps("min_p", draw.choice([1e-6, 0.01, 0.2, 1.0]))
    perhaps("typical_p", draw.choice([0.0, 0.2, 0.9, 0.999]))
    perhaps("repetition_penalty", draw.choice([0.5, 1.1, 3.0]))
    perhaps("presence_penalty", draw.choice([-2.0, 0.3, 2.0]))
    perhaps("frequency_penalty", draw.choice([-0.5, 0.01, 2.0]))
    perhaps("logit_bias", tuple((i, draw.uniform(-5, 5)) for i in sorted(ids[:20])), 0.2)
    perhaps("allowed_ids", tuple(ids[10:50]), 0.1)
    perhaps("banned_ids", tuple(ids[40:]), 0.2)
    perhaps("logprobs", draw.randint(0, 5), 0.2)
    if draw.random() < 0.2:
        params |= {"min_new_tokens": draw.randint(0, 300), "end_ids": tuple(ids[5:8])}
    return params


@pytest.mark.parametrize("kind", ["flat", "peaked", "equal", "few", "bf16", "extreme"])
def test_every_token_is_the_one_that_sorting_row_by_row_gives(kind: str) -> None:
    """Whatever requests ask for together, on logits of any form, rows of 160 different requests in one call."""
    draw = random.Random(f"sampling {kind}")
    logits = {
        "flat": lambda: _logits(160, seed=1, spread=0.3),
        "peaked": lambda: _logits(160, seed=2, spread=6.0),
        "equal": lambda: torch.zeros(160, VOCABULARY),
        "few": lambda: torch.full((160, VOCABULARY), -math.inf).index_fill_(1, torch.tensor([3, 700, 4999]), 0.5),
        "bf16": lambda: _logits(160, seed=3, spread=2.0).bfloat16().float(),
        "extreme": lambda: _logits(160, seed=4, spread=1e30),
    }[kind]()
    logits[17, 5] = math.nan
    logits[18] = -math.inf
    states = [_state(**_random_params(draw)) for _ in range(160)]
    for i, state in enumerate(states):
        states[i] = dataclasses.replace(state, start=dataclasses.replace(state.start, sequence=SequenceId(i)))
    expected, expected_faults = reference_sampler.sample(logits.clone(), states)
    got, faults = sample(logits.clone(), states)
    assert [(s.sequence, s.token_id) for s in got] == [(s.sequence, s.token_id) for s in expected]
    assert {(f.sequence, f.message) for f in faults} == {(f.sequence, f.message) for f in expected_faults}
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours.logprob is None) == (theirs.logprob is None)
        if ours.logprob is not None and theirs.logprob is not None:
            assert (ours.logprob.token_id, ours.logprob.rank) == (theirs.logprob.token_id, theirs.logprob.rank)
            assert ours.logprob.logprob == pytest.approx(theirs.logprob.logprob, abs=1e-9)
            assert [p for _, p in ours.logprob.top] == pytest.approx([p for _, p in theirs.logprob.top], abs=1e-9)


def test_what_was_seen_is_counted_once_and_followed() -> None:
    """Token by token, in jumps and from a state made anew, the counts are those of the whole list."""
    draw = random.Random(5)
    prompt = tuple(draw.choices(range(40), k=30))
    state = _state(prompt=prompt)
    for jump in (0, 1, 1, 7, 100, 0, 3):
        state.token_ids.extend(draw.choices(range(60), k=jump))
        output = Counter(state.token_ids[len(prompt) :])
        for seen in (state.seen(), _state(prompt=prompt, output=tuple(state.token_ids[len(prompt) :])).seen()):
            assert sorted(seen.ids) == sorted(set(state.token_ids))
            assert {i: n for i, n in zip(seen.ids, seen.times, strict=True) if n} == dict(output)
