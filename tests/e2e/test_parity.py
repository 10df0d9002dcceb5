"""Every family gives transformers' own tokens over gRPC: alone, batched, chunked, preempted, and from the prefix cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from serve.v1 import admin_pb2, inference_pb2
from tests.support import reference
from tests.support.models import FAMILIES, VOCABULARY, save
from tests.support.server import Server, serving

NEW_TOKENS = 48
BLOCKS = 48
"""Sixteen sequences need about 170 blocks of 16 positions: they preempt one another."""
CASES = [(family, ranks) for family in FAMILIES for ranks in (1, 2) if ranks > 1 or family in ("gpt_neox", "gpt2", "mistral")]
"""On one rank a family of each kind of positions and windows; that all give the same there is shown without a server, too."""


@dataclass
class Judge:
    """transformers' model of one family, for both tensor-parallel sizes."""

    folder: Path
    model: PreTrainedModel
    generated: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def greedy(self, prompt: tuple[int, ...]) -> list[int]:
        """What it generates token by token, computed once."""
        if prompt not in self.generated:
            self.generated[prompt] = reference.greedy(self.model, prompt, NEW_TOKENS)
        return self.generated[prompt]

    def chosen(self, prompt: tuple[int, ...], answer: list[int]) -> list[int]:
        """What it chooses after each token of an answer, which must be that answer."""
        assert len(answer) == NEW_TOKENS
        return reference.chosen(self.model, prompt, answer)


@pytest.fixture(scope="module")
def judge_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Judge]:
    @cache
    def judge_of(family: str) -> Judge:
        folder = save(family, tmp_path_factory.mktemp("parity") / family, max_shard_size="300KB", with_tokenizer=False)
        return Judge(folder, reference.load(folder))

    return judge_of


@pytest.fixture(scope="module", params=CASES, ids=[f"tp{ranks}-{family}" for family, ranks in CASES])
def case(request: pytest.FixtureRequest) -> tuple[str, int]:
    """Family and number of ranks."""
    found: tuple[str, int] = request.param
    return found


@pytest.fixture(scope="module")
def judge(case: tuple[str, int], judge_of: Callable[[str], Judge]) -> Judge:
    return judge_of(case[0])


@pytest.fixture(scope="module")
def server(case: tuple[str, int], judge: Judge) -> Iterator[Server]:
    """A budget of 32 chunks every longer prompt, few blocks make the mixed batch preempt, and two ranks compute guesses too."""
    config, ranks = judge.model.config, case[1]
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    block_bytes = 2 * config.num_hidden_layers * kv_heads // ranks * 16 * 16 * 4
    gib = (BLOCKS + 0.5) * block_bytes / 2**30
    options = ("--tensor-parallel-size", str(ranks), "--dtype", "float32", "--speculative-tokens", str(4 * (ranks - 1)))
    with serving(judge.folder, *options, "--max-step-tokens", "32", "--kv-cache-gib", f"{gib:.9f}") as running:
        assert running.ready["kv_blocks"] == str(BLOCKS)
        yield running


def _request(prompt: Sequence[int], **response: int) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(response=inference_pb2.ResponseOptions(**response))
    request.token_ids.ids.extend(prompt)
    request.sampling.temperature = 0.0
    request.stopping.max_new_tokens = NEW_TOKENS
    request.stopping.ignore_eos = True
    return request


def _generate(server: Server, prompt: Sequence[int]) -> list[int]:
    answer = server.inference.Generate(_request(prompt), timeout=400)
    return list(answer.completions[0].token_ids)


def _prompts(seed: int, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    source = random.Random(seed)
    return [tuple(source.randrange(1, VOCABULARY) for _ in range(length)) for length in lengths]


def test_alone(server: Server, judge: Judge) -> None:
    for prompt in _prompts(1, [1, 16, 131]):
        assert _generate(server, prompt) == judge.greedy(prompt)


def _together(server: Server, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Answers to prompts that arrive by one call, one right behind the other, whatever else keeps the machine busy."""
    requests = [_request(prompt) for prompt in prompts]
    for number, request in enumerate(requests):
        request.request_id = str(number)
    answers: list[list[int]] = [[] for _ in prompts]
    for event in server.inference.GenerateBatch(iter(requests), timeout=400):
        assert event.WhichOneof("event") != "error", event
        if event.WhichOneof("event") == "delta":
            answers[int(event.request_id)] += event.delta.token_ids
    return answers


def test_sixteen_at_once_preempting_one_another(server: Server, judge: Judge) -> None:
    prompts = _prompts(2, [1, 2, 15, 16, 17, 31, 33, 48, 64, 90, 128, 155, 200, 256, 299, 300])
    before = server.metrics()["tessera_preemptions_total"]
    for _ in range(20):  # where a busy machine lets the first end before the last are there, they are asked for again
        answers = _together(server, prompts)
        assert answers == [judge.chosen(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        if server.metrics()["tessera_preemptions_total"] > before:
            return
    pytest.fail("sixteen sequences that need four times the blocks there are never preempted one another")


def test_prompts_that_share_a_cached_prefix(server: Server, judge: Judge) -> None:
    server.admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest())
    [shared] = _prompts(3, [100])
    tails = _prompts(4, [1, 20, 45])
    cached = []
    for tail in tails:
        answer = server.inference.Generate(_request(shared + tail), timeout=400)
        ids = list(answer.completions[0].token_ids)
        assert ids == judge.chosen(shared + tail, ids)
        cached.append(answer.prompt.cached_tokens)
    assert cached == [0, 96, 96]


def test_logprobs_of_prompt_and_output(server: Server, judge: Judge) -> None:
    [prompt] = _prompts(5, [150])
    answer = server.inference.Generate(_request(prompt, logprobs=3, prompt_logprobs=2), timeout=400)
    completion = answer.completions[0]
    ids = [*prompt, *completion.token_ids]
    expected = reference.logprobs(judge.model, ids)
    assert not answer.prompt.logprobs[0].HasField("logprob")
    entries = [*answer.prompt.logprobs[1:], *completion.logprobs]
    assert len(entries) == len(ids) - 1
    for position, entry in enumerate(entries):
        assert entry.token_id == ids[position + 1]
        assert entry.logprob == pytest.approx(float(expected[position, ids[position + 1]]), abs=1e-4)
        for top in entry.top:
            assert top.logprob == pytest.approx(float(expected[position, top.token_id]), abs=1e-4)
        assert entry.top[0].logprob == pytest.approx(float(expected[position].max()), abs=1e-4)


def test_nothing_is_held_afterwards_and_two_ranks_have_computed_guesses(server: Server, case: tuple[str, int]) -> None:
    metrics = server.metrics()
    assert metrics["tessera_kv_blocks_used"] == 0
    assert (metrics["tessera_speculative_proposed_tokens_total"] > 0) == (case[1] > 1)
