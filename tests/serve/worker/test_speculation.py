"""What is generated is the same whether tokens are proposed or not."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from serve.config import CacheConfig, ModelConfig, ServerConfig
from serve.engine.stats import EngineStats
from serve.types import (
    Generation,
    RequestFailed,
    RequestId,
    ResponseOptions,
    SamplingParams,
    SequenceFinished,
    StoppingParams,
    TokenLogprob,
    TokensOut,
)
from serve.worker.loader import RankModel, Stopwatch, load_rank
from serve.worker.parallel import Ranks
from serve.worker.runner import Runner
from tests.serve.engine.engines import make_engine, run
from tests.serve.fake_executor import OnlyRank
from tests.support.models import VOCABULARY, save

NUM_REQUESTS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RankModel:
    torch.set_num_threads(1)
    folder = save("gpt_neox", tmp_path_factory.mktemp("speculation"), with_tokenizer=False, num_hidden_layers=2)
    config = ServerConfig(
        model=ModelConfig(path=str(folder), dtype="float32", device="cpu"),
        cache=CacheConfig(kv_cache_gib=0.004, block_tokens=4),
    )
    return load_rank(config, 0, torch.device("cpu"), lambda: Ranks(0, 1), Stopwatch())[0]


def requests() -> list[Generation]:
    """Every rule there is, and so few tokens to choose from that some are guessed."""
    draw = random.Random(5)
    chance, pick = draw.random, draw.randint
    generations = []
    for number in range(NUM_REQUESTS):
        few = tuple(draw.sample(range(1, VOCABULARY), pick(2, 6)))
        max_new = pick(1, 40)
        params = SamplingParams(
            temperature=draw.choice((0.0, 0.3, 1.0, 2.0)),
            seed=pick(0, 2**64 - 1),
            top_k=draw.choice((0, 0, 3)),
            top_p=draw.choice((1.0, 0.8)),
            min_p=draw.choice((0.0, 0.1)),
            typical_p=draw.choice((1.0, 1.0, 0.9)),
            repetition_penalty=draw.choice((1.0, 1.0, 1.3)),
            presence_penalty=draw.choice((0.0, 0.0, 0.7)),
            frequency_penalty=draw.choice((0.0, 0.0, 0.2)),
            logit_bias=((few[0], 1.0),) if chance() < 0.3 else (),
            banned_ids=few[:1] if chance() < 0.2 else (),
            allowed_ids=few if chance() < 0.8 else (),
        )
        letters = "".join(chr(ord("a") + token % 26) for token in draw.choices(few, k=pick(2, 3)))
        generations.append(
            Generation(
                request_id=RequestId(f"r{number}"),
                prompt_ids=tuple(draw.choices(few, k=pick(1, 30))),
                sampling=params,
                stopping=StoppingParams(
                    max_new_tokens=max_new,
                    min_new_tokens=pick(0, max_new) if chance() < 0.3 else 0,
                    stop_strings=(letters,) if chance() < 0.3 else (),
                    stop_ids=few[-1:] if chance() < 0.2 else (),
                    include_stop=chance() < 0.5,
                ),
                response=ResponseOptions(
                    text=chance() < 0.7,
                    logprobs=pick(0, 3) if chance() < 0.4 else None,
                    prompt_logprobs=1 if chance() < 0.1 else None,
                ),
                num_sequences=pick(2, 3) if chance() < 0.2 else 1,
            )
        )
    return generations


Said = tuple[list[int], str, list[TokenLogprob], SequenceFinished | None]


def answers(
    model: RankModel, generations: list[Generation], draft: RankModel | None = None, **limits: int
) -> tuple[dict[tuple[str, int], Said], dict[str, str], EngineStats]:
    """What each sequence said, who failed and how, and the engine's figures."""
    facts = dataclasses.replace(model.facts, num_blocks=limits.pop("num_blocks", model.facts.num_blocks))
    engine = make_engine(facts, executor=OnlyRank(Runner(model, Ranks(0, 1), draft)), drafts=draft is not None, **limits)
    for generation in generations:
        engine.add(generation)
    said: dict[tuple[str, int], Said] = {}
    failed: dict[str, str] = {}
    for event in run(engine):
        if isinstance(event, RequestFailed):
            failed[event.request_id] = str(event.error)
        elif isinstance(event, TokensOut | SequenceFinished):
            key = (event.request_id, event.index)
            ids, text, logprobs, _ = said.get(key, ([], "", [], None))
            if isinstance(event, TokensOut):
                said[key] = ([*ids, *event.token_ids], text + event.text, [*logprobs, *event.logprobs], None)
            else:
                said[key] = (ids, text, logprobs, event)
    return said, failed, engine.stats()


def _compare(plain: dict[tuple[str, int], Said], guessed: dict[tuple[str, int], Said]) -> None:
    assert plain.keys() == guessed.keys()
    for key, (ids, text, logprobs, end) in plain.items():
        other_ids, other_text, other_logprobs, other_end = guessed[key]
        assert (other_ids, other_text) == (ids, text), key
        assert len(other_logprobs) == len(logprobs), key
        for one, other in zip(logprobs, other_logprobs, strict=True):
            assert (other.token_id, other.rank) == (one.token_id, one.rank), key
            assert other.logprob == pytest.approx(one.logprob, abs=1e-4)
            assert [token for token, _ in other.top] == [token for token, _ in one.top]
        assert end is not None
        assert other_end is not None
        assert (other_end.reason, other_end.matched_stop) == (end.reason, end.matched_stop), key
        assert other_end.usage.completion_tokens == end.usage.completion_tokens, key


def test_every_request_says_the_same_with_proposed_tokens_and_without(model: RankModel) -> None:
    generations = requests()
    plain, failed, _ = answers(model, generations)
    for limits in (
        {"speculative_tokens": 8, "max_num_seqs": 1},
        {"speculative_tokens": 3, "num_blocks": 30, "max_step_tokens": 24},
    ):
        guessed, also_failed, stats = answers(model, generations, **limits)
        _compare(plain, guessed)
        assert also_failed == failed
        assert stats.proposed_tokens - stats.accepted_tokens > 50
        assert stats.accepted_tokens > 50
        assert (stats.preemptions > 0) == ("num_blocks" in limits)
