"""Ranks that were given the next step before the one they compute was answered."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.config import ModelConfig, ServerConfig, SupervisorConfig
from serve.engine.engine import Engine, EngineLimits
from serve.engine.executor import ModelFacts
from serve.engine.plan import Span, Start, StepPlan
from serve.errors import RequestAborted
from serve.types import (
    BlockId,
    Generation,
    RequestId,
    ResponseOptions,
    SamplingParams,
    SequenceFinished,
    SequenceId,
    StoppingParams,
    TokensOut,
)
from serve.worker.executor import RankExecutor
from serve.worker.rank_process import ForkStarter
from tests.support.models import save


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RankExecutor, ModelFacts]]:
    """Two ranks; the tests leave them nothing under way, and use other sequences."""
    model = save("gpt_neox", tmp_path_factory.mktemp("model") / "neox", with_tokenizer=False)
    config = ServerConfig(
        model=ModelConfig(path=str(model), tensor_parallel_size=2, device="cpu"),
        supervisor=SupervisorConfig(heartbeat_timeout_seconds=60.0, load_stall_seconds=60.0),
    )
    with (
        contextlib.closing(ForkStarter(2, "cpu", stall_seconds=60.0)) as starter,
        contextlib.closing(RankExecutor(config, starter)) as executor,
    ):
        facts = executor.start()
        yield executor, facts


@pytest.fixture
def started(ranks: tuple[RankExecutor, ModelFacts]) -> RankExecutor:
    return ranks[0]


def plan(step: int, prompt: tuple[int, ...] = (3, 4, 5), block: int = 0) -> StepPlan:
    """The prompt of a sequence of its own."""
    sequence = SequenceId(step)
    start = Start(sequence=sequence, index=0, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=SamplingParams())
    span = Span(sequence=sequence, start=0, count=len(prompt), new_blocks=(BlockId(block),), sample=True)
    return StepPlan(step=step, starts=(start,), spans=(span,))


def test_a_step_may_begin_with_tokens_that_the_server_has_not_seen(started: RankExecutor) -> None:
    """Both ranks go on with what rank 0 drew; penalties count it, and a draw knows its place."""
    rules = SamplingParams(seed=7, temperature=0.9, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.5)
    prompts = ((3, 4, 5), (8, 8, 9, 2, 6))
    steps, told = itertools.count(), []
    for runs_ahead in (False, True):
        ids = [SequenceId(10 * runs_ahead + number) for number in range(2)]
        got: dict[SequenceId, list[int]] = {sequence: [] for sequence in ids}
        for round_ in range(6):
            starts = tuple(
                Start(sequence=sequence, index=0, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=rules)
                for sequence, prompt in zip(ids, prompts, strict=True)
            )
            spans = tuple(
                Span(
                    sequence=sequence,
                    start=len(prompt) + round_ - 1 if round_ else 0,
                    count=1 if round_ else len(prompt),
                    continues=runs_ahead and round_ > 0,
                    new_tokens=() if runs_ahead else tuple(got[sequence][-1:]),
                    new_blocks=() if round_ else (BlockId(sequence),),
                    sample=True,
                )
                for sequence, prompt in zip(ids, prompts, strict=True)
            )
            started.launch(StepPlan(step=next(steps), starts=() if round_ else starts, spans=spans))
            results = [started.collect()] if not runs_ahead else [started.collect()] if round_ else []
            results += [started.collect()] if runs_ahead and round_ == 5 else []
            for answer in (answer for result in results for answer in result.sampled):
                got[answer.sequence].append(answer.token_id)
        told.append(list(got.values()))
    assert told[0] == told[1]
    assert len({tuple(tokens) for tokens in told[0]}) == 2


def test_a_plan_larger_than_a_socket_takes_is_sent_once_the_step_before_it_is_computed(started: RankExecutor) -> None:
    started.launch(plan(100))
    first = plan(101).starts[0]
    many = tuple(dataclasses.replace(first, sequence=SequenceId(102 + n), token_ids=(500,) * 500) for n in range(400))
    spans = tuple(Span(sequence=start.sequence, start=0, count=1, new_blocks=(BlockId(1 + n),)) for n, start in enumerate(many))
    started.launch(StepPlan(step=101, starts=many, spans=spans))
    started.launch(plan(2000))
    assert [started.collect().step for _ in range(3)] == [100, 101, 2000]


def random_requests(count: int) -> list[Generation]:
    draw = random.Random(5)
    return [
        Generation(
            request_id=RequestId(str(number)),
            prompt_ids=tuple(draw.choices(range(2, 500), k=draw.randint(1, 40))),
            sampling=SamplingParams(
                temperature=draw.choice((0.0, 0.8, 1.5)),
                top_p=draw.choice((1.0, 0.9)),
                seed=number,
                repetition_penalty=draw.choice((1.0, 1.2)),
                presence_penalty=draw.choice((0.0, 0.5)),
            ),
            stopping=StoppingParams(
                max_new_tokens=draw.randint(1, 24),
                stop_ids=tuple(draw.sample(range(509), 40)),
                min_new_tokens=draw.randint(0, 1),
            ),
            response=ResponseOptions(text=False, logprobs=draw.choice((None, 2))),
            num_sequences=draw.choice((1, 1, 2)),
            priority=draw.randint(0, 1),
        )
        for number in range(count)
    ]


def test_answers_are_the_same_with_and_without_a_step_ahead(ranks: tuple[RankExecutor, ModelFacts]) -> None:
    """Of a model on two ranks, in a cache that is too small, with cancelled requests among the others."""
    executor, facts = ranks
    told, preemptions = [], []
    for async_scheduling in (False, True):
        limits = EngineLimits(
            max_num_seqs=6,
            max_step_tokens=48,
            max_queued_requests=99,
            max_queued_tokens=9_999,
            prefix_caching=True,
            async_scheduling=async_scheduling,
        )
        engine = Engine(
            facts=dataclasses.replace(facts, num_blocks=160 // facts.block_tokens),
            limits=limits,
            executor=executor,
            open_text=lambda *_: pytest.fail("no text was asked for"),
            clock=lambda: 0.0,
        )
        said: dict[tuple[RequestId, int], list[object]] = {}
        for generation in random_requests(24):
            engine.add(generation)
        for step in itertools.count():
            if not engine.has_work:
                break
            if step in (3, 9):
                engine.abort(engine.request_ids[0], RequestAborted("by the test"))
            for event in engine.step():
                if isinstance(event, TokensOut):
                    ids = [each.token_id for each in event.logprobs]
                    said.setdefault((event.request_id, event.index), []).extend((*event.token_ids, *ids))
                elif isinstance(event, SequenceFinished):
                    said.setdefault((event.request_id, event.index), []).append((event.reason, event.matched_stop))
        told.append(said)
        preemptions.append(engine.stats().preemptions)
    assert min(preemptions) > 0
    ended = [{key: said for key, said in each.items() if isinstance(said[-1], tuple)} for each in told]
    both = ended[0].keys() & ended[1].keys()
    assert len(both) > 20
    assert {key: ended[0][key] for key in both} == {key: ended[1][key] for key in both}
    reasons = {said[-1] for said in ended[1].values()}
    assert len(reasons) > 2, "stop ids ended some"


def test_the_only_rank_lets_a_plan_overtake_the_one_before_it_and_answers_both(tmp_path: Path) -> None:
    """A rank that stands still has read neither: when it goes on, it finds the second in the middle of the first."""
    config = ServerConfig(
        model=ModelConfig(path=str(save("gpt_neox", tmp_path / "neox", with_tokenizer=False)), device="cpu"),
        supervisor=SupervisorConfig(heartbeat_timeout_seconds=60.0, load_stall_seconds=60.0),
    )
    with (
        contextlib.closing(ForkStarter(1, "cpu", stall_seconds=60.0)) as starter,
        contextlib.closing(RankExecutor(config, starter)) as executor,
    ):
        executor.start()
        prompts = ((3, 4, 5), (8, 8, 9, 2, 6))
        alone = [executor.execute(plan(step, prompt)).sampled[0].token_id for step, prompt in enumerate(prompts)]
        [rank] = executor._ranks
        for first, overtakes in ((2, False), (4, True)):
            rank.process.send_signal(signal.SIGSTOP)
            for number in range(2):
                executor.launch(plan(first + number, prompts[number], block=number), overtakes=overtakes and number == 1)
            rank.process.send_signal(signal.SIGCONT)
            answers = [executor.collect() for _ in range(2)]
            assert [answer.step for answer in answers] == ([first + 1, first] if overtakes else [first, first + 1])
            assert [answer.sampled[0].token_id for answer in answers] == (alone[::-1] if overtakes else alone)
        assert executor.execute(plan(6)).sampled[0].token_id == alone[0]
