"""A step that is launched before the one before it is settled gives what it gives behind it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.engine.plan import DRAFTED, Span, Start, StepPlan, StepResult
from serve.model.cuda.backend import TritonBackend
from serve.model.cuda.graphs import graphs_of
from serve.model.heads import Stage
from serve.types import BlockId, SamplingParams, SequenceId, TokensOut
from serve.worker.batch import UNKNOWN, SequenceState
from serve.worker.decode_graphs import DecodeGraphs
from serve.worker.loader import RankModel
from serve.worker.parallel import Ranks
from serve.worker.runner import Runner
from serve.worker.sampling.backend import TorchSampling
from serve.worker.sampling.captured import MOST_SEEN, CapturedSampling
from serve.worker.sampling.sampler import launch_sampling
from tests.serve.engine.engines import make_engine
from tests.serve.fake_executor import Deferred, OnlyRank
from tests.serve.worker.captured import load_captured
from tests.serve.worker.launches import without_kernels
from tests.serve.worker.steps_ahead import OneAhead, one_ahead, plans
from tests.serve.worker.test_ahead import random_requests
from tests.serve.worker.test_decode_graphs import CASES, saved
from tests.serve.worker.waits import WholeStep, on_meta

ALONE = Ranks(0, 1)
GREEDY = SamplingParams()
DRAWN = (
    SamplingParams(temperature=1.0, top_k=50, seed=1),
    SamplingParams(temperature=1.3, typical_p=0.9, min_p=0.01, banned_ids=(3, 4), seed=2),
    SamplingParams(allowed_ids=tuple(range(9, 200)), logit_bias=((10, 1.0),)),
)
PENALISED = (
    GREEDY,
    SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.7, seed=5),
    SamplingParams(presence_penalty=0.6, repetition_penalty=0.9),
)


@pytest.fixture(autouse=True)
def _one_thread_without_gradients() -> Iterator[None]:
    torch.set_num_threads(1)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RankModel:
    return load_captured(saved("llama", tmp_path_factory.mktemp("ahead")), ALONE, most=8)


@pytest.fixture
def runner(model: RankModel) -> Runner:
    made = Runner(model, ALONE)
    assert made.graphs is not None
    made.graphs.capture()
    return made


def told(results: list[StepResult | None]) -> list[StepResult]:
    """Without what says when it was launched."""
    return [dataclasses.replace(result, was_late=None) for result in results if result is not None]


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("sampling", [(), DRAWN, PENALISED], ids=["greedy", "drawn", "penalised"])
def test_steps_give_what_they_give_one_after_the_other(
    runner: Runner, sampling: tuple[SamplingParams, ...], logprobs: int | None
) -> None:
    """Prompts in chunks beside tokens, then replayed steps of one to three rows, behind both."""
    wanted = list(plans(sampling, logprobs=logprobs))
    expected = told([runner.execute(plan) for plan in wanted])
    *all_but_last, last = wanted
    found, followed = one_ahead(runner, all_but_last)
    said = [[each.token_id for result in expected for each in result.sampled if each.sequence == i] for i in range(3)]
    for sequence, state in runner._table._sequences.items():
        assert state.token_ids == [*state.start.token_ids, *said[sequence][:-1]], "as the host knows it in the end"
        assert state.drawn == said[sequence][-1]
    assert told([*found, runner.execute(last)]) == expected
    assert sum(len(result.sampled) for result in expected) == 3 * 16
    assert any(result.prompt_logprobs for result in expected) == (logprobs is not None)
    assert not any(result.faults for result in expected)
    assert followed == sum(all(span.count == 1 for span in plan.spans) for plan in all_but_last) > 12
    assert len(runner._table) == 0


class _OneAheadRank(Deferred):
    """An executor of one rank, in this process, that launches a plan as soon as it comes."""

    def __init__(self, runner: Runner) -> None:
        self.ahead = OneAhead(runner)

    def launch(self, plan: StepPlan, *, overtakes: bool = False) -> None:
        self.ahead.launch(plan)

    def collect(self) -> StepResult:
        if not self.ahead.results:
            self.ahead.settle_oldest()
        result = self.ahead.results.popleft()
        assert result is not None
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        self.launch(plan)
        return self.collect()


def test_an_engine_says_the_same(model: RankModel, runner: Runner) -> None:
    """Of requests that end by tokens and give way, some of which draw, tell log probabilities, or have penalties."""
    said = []
    executor = _OneAheadRank(runner)
    for runs_ahead in (False, True):
        facts = dataclasses.replace(model.facts, num_blocks=160 // model.facts.block_tokens)
        limits = {"max_num_seqs": 6, "max_step_tokens": 48, "async_scheduling": runs_ahead}
        engine = make_engine(facts, executor=executor if runs_ahead else OnlyRank(runner), **limits)
        for generation in random_requests(24):
            engine.add(generation)
        got: dict[Any, list[int]] = {}
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, TokensOut):
                    ids = [each.token_id for each in event.logprobs]
                    got.setdefault((event.request_id, event.index), []).extend((*event.token_ids, *ids))
            engine.check()
        said.append(got)
        assert engine.stats().preemptions > 0
    assert said[0] == said[1]
    assert executor.ahead.followed > 20


@pytest.mark.parametrize("most", [MOST_SEEN, 3], ids=["captured", "more than are captured"])
def test_a_token_that_nobody_has_read_counts_for_penalties(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, new or seen before; rows without one, and without penalties, are what they are."""
    draw, vocabulary = random.Random(3), 40
    monkeypatch.setattr("serve.worker.sampling.captured.MOST_SEEN", most)
    logits = torch.randn(8, vocabulary, generator=torch.Generator().manual_seed(1))
    place = torch.empty(8, vocabulary)
    captured = CapturedSampling(place)
    captured.capture(graphs_of(torch.device("cpu")))
    for _ in range(20):
        known, unread = list[SequenceState](), list[SequenceState]()
        for row in range(6):
            rules = {} if row == 2 else {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.25 * row}
            sampling = SamplingParams(temperature=draw.choice((0.0, 0.9)), seed=row, **rules)
            ids = tuple(draw.choices(range(12), k=draw.randint(2, 20)))
            start = Start(
                sequence=SequenceId(row), index=0, token_ids=ids[:1], num_prompt_tokens=1, sampling=sampling, logprobs=2
            )
            known.append(SequenceState(start, list(ids)))
            unread.append(SequenceState(start, [*ids[:-1], UNKNOWN if row != 4 else ids[-1]]))
        last = torch.tensor([state.token_ids[-1] for state in known])
        changed = []
        for states in draw.sample((known, unread), 2):
            for backend in (TorchSampling(), captured):
                place.copy_(logits)
                told = launch_sampling(place[:6], states, backend, last).read()
                changed.append((told, place[:6].clone()))
        for told, place_RV in changed[1:]:
            assert told == changed[0][0]
            assert torch.equal(place_RV, changed[0][1])


def test_a_sequence_that_has_a_fault_costs_nobody_else_anything(model: RankModel, runner: Runner) -> None:
    """Its next step is launched by then; the one after that goes on with any token, and it is dropped."""
    [embedding] = [layer for layer in model.body.modules() if isinstance(layer, torch.nn.Embedding)]
    bad = 7
    sampling = SamplingParams(banned_ids=(bad,))
    prompts = ((5, 8, 9), (4, bad, 6))
    kept = embedding.weight[bad].clone()
    alone = told([runner.execute(plan) for plan in plans((sampling,), prompts[:1], new_tokens=6)])
    try:
        embedding.weight[bad] = float("nan")
        found, followed = one_ahead(runner, plans((sampling, sampling), prompts, new_tokens=6))
    finally:
        embedding.weight[bad] = kept
    assert followed > 4
    assert [[s.token_id for s in result.sampled] for result in told(found)] == [
        [s.token_id for s in result.sampled] for result in alone
    ]
    faults = [[(fault.sequence, fault.not_finite) for fault in result.faults] for result in told(found)]
    assert faults == [[(SequenceId(1), True)]] * 6 + [[]]
    messages = [result.faults[0].message for result in told(found)[:2]]
    assert "position 3 are" in messages[0], "that of the step which it was computed in"
    assert "position 4 are" in messages[1]


def test_one_may_end_and_another_begin_under_its_number_before_its_token_was_read(runner: Runner) -> None:
    rules = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5)
    first = Span(sequence=SequenceId(1), start=0, count=3, new_blocks=(BlockId(1),), sample=True)
    again = StepPlan(
        step=1,
        dropped=(SequenceId(1),),
        starts=(Start(sequence=SequenceId(1), index=0, token_ids=(4,), num_prompt_tokens=1, sampling=rules),),
        spans=(Span(sequence=SequenceId(1), start=0, count=1, new_blocks=(BlockId(3),), sample=True),),
    )
    going_on = [
        StepPlan(step=2 + n, spans=(Span(sequence=SequenceId(1), start=1 + n, count=1, continues=True, sample=True),))
        for n in range(4)
    ]
    wanted = [StepPlan(step=0, starts=(_start(rules, SequenceId(1)),), spans=(first,)), again, *going_on]
    expected = told([runner.execute(plan) for plan in wanted])
    runner.execute(StepPlan(step=9, dropped=(SequenceId(1),)))
    found, followed = one_ahead(runner, wanted)
    assert followed == 5
    assert told(found) == expected
    said = [result.sampled[0].token_id for result in expected]
    assert runner._table.state(SequenceId(1)).token_ids == [4, *said[1:-1]]
    runner.execute(StepPlan(step=9, dropped=(SequenceId(1),)))


def _start(sampling: SamplingParams, sequence: SequenceId = SequenceId(0)) -> Start:
    return Start(sequence=sequence, index=0, token_ids=(5, 8, 9), num_prompt_tokens=3, sampling=sampling)


@pytest.mark.parametrize(
    ("sampling", "span", "follows"),
    [
        (GREEDY, {"continues": True}, True),
        (SamplingParams(temperature=0.7, top_p=0.8, banned_ids=(3,)), {"continues": True}, True),
        (SamplingParams(repetition_penalty=0.9), {"continues": True}, True),
        (GREEDY, {"new_tokens": (3, 4), "count": 2}, False),
        (GREEDY, {"new_tokens": (3,), "count": 2, "proposed": (4,)}, False),
        (GREEDY, {"new_tokens": (3,), "count": 2, "proposed": (DRAFTED,)}, False),
    ],
)
def test_a_plan_waits_where_it_is_not_replayed_or_the_host_computes_by_the_token(
    runner: Runner, sampling: SamplingParams, span: dict[str, Any], follows: bool
) -> None:
    prompt = Span(sequence=SequenceId(0), start=0, count=3, new_blocks=(BlockId(1),), sample=True)
    runner.settle(runner.launch(StepPlan(step=0, starts=(_start(sampling),), spans=(prompt,))))
    plan = StepPlan(step=1, spans=(Span(**{"sequence": SequenceId(0), "start": 3, "count": 1, "sample": True} | span),))
    assert runner.follows(plan) is follows
    assert not runner.follows(dataclasses.replace(plan, swap=1))
    assert not runner.follows(StepPlan(step=1)), "there is nothing to compute"
    assert not runner.follows(dataclasses.replace(plan, spans=plan.spans * 9)), "steps of eight rows at most are replayed"
    assert isinstance(runner.graphs, DecodeGraphs)
    runner.graphs.forget()
    assert not runner.follows(plan)
    runner.graphs.capture()
    runner.goes_ahead = False
    assert not runner.follows(plan)


def test_a_plan_waits_for_guesses_to_be_told(runner: Runner) -> None:
    prompt = Span(sequence=SequenceId(0), start=0, count=4, new_blocks=(BlockId(1),), sample=True, proposed=(4,))
    guessed = StepPlan(step=0, starts=(_start(GREEDY),), spans=(prompt,))
    plan = StepPlan(step=1, spans=(Span(sequence=SequenceId(0), start=3, count=1, continues=True, sample=True),))
    runner.launch(guessed)
    assert not runner.follows(plan)


def test_only_where_steps_are_captured_they_are_launched_ahead(model: RankModel) -> None:
    assert Runner(model, ALONE).goes_ahead
    assert not Runner(dataclasses.replace(model, graph_sizes=()), ALONE).goes_ahead, "a CPU computes what it launches"
    assert not Runner(model, Ranks(0, 1, stage=Stage(0, 2))).goes_ahead


@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_for_nothing_between_two_steps(name: str, tmp_path: Path) -> None:
    """On ``meta``, with the back end of CUDA, piece by piece: steps with prompts and of tokens alone, drawn ones too."""
    runner = Runner(on_meta(saved(name, tmp_path), TritonBackend(132)), ALONE)
    runner.goes_ahead = True
    before: list[StepPlan] = []
    with without_kernels([]):
        for plan in list(plans(DRAWN, ((5, 8, 9, 3), (4, 3, 6, 9, 1), tuple(range(5, 45))), new_tokens=4, logprobs=1))[:-1]:
            before.append(plan)
            if len(before) < 2:
                launched = runner.launch(plan)
                continue
            with WholeStep() as looked:
                following = runner.launch(plan, follows=True)
                assert looked.reads == 0
                result = runner.settle(launched)
            assert looked.found == []
            assert result is not None
            assert looked.reads > 0
            assert len(result.sampled) > 1
            assert any(span.continues for span in plan.spans)
            launched = following
    assert len(before) > 4
    state = runner._table.state(SequenceId(2))
    assert (state.token_ids[-1], state.drawn) == (1, UNKNOWN), "what meta's numbers were read as, and what nobody has read"
