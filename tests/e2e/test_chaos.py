"""Many streams at once, some of them cancelled: the others are exact, nothing leaks, and the counters tell the truth."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from transformers import PreTrainedModel

from serve.v1 import admin_pb2, inference_pb2
from tests.support import reference
from tests.support.models import VOCABULARY
from tests.support.server import Server, serving, until


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, "--tensor-parallel-size", "2", "--max-step-tokens", "96") as running:
        yield running


@dataclass(frozen=True)
class Plan:
    """What one stream will do."""

    prompt: tuple[int, ...]
    tokens: int
    cancel_after: int | None


def _request(plan: Plan) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(plan.prompt)
    request.sampling.temperature = 0.0
    request.stopping.max_new_tokens = plan.tokens
    request.stopping.ignore_eos = True
    return request


def _run(server: Server, plan: Plan) -> tuple[list[int], str]:
    """The ids a stream gave, and the status it ended with."""
    call = server.inference.GenerateStream(_request(plan), timeout=400)
    ids: list[int] = []
    try:
        for event in call:
            ids.extend(event.delta.token_ids)
            if plan.cancel_after is not None and len(ids) >= plan.cancel_after:
                call.cancel()
    except grpc.RpcError as error:
        return ids, error.code().name
    return ids, "OK"


def test_a_third_cancelled_the_rest_exact(server: Server, model: PreTrainedModel) -> None:
    source = random.Random(11)
    plans = []
    for index in range(64):
        prompt = tuple(source.randrange(1, VOCABULARY) for _ in range(source.randint(1, 120)))
        tokens = source.randint(20, 60)
        plans.append(Plan(prompt, tokens, source.randint(1, 15) if index % 3 == 0 else None))
    with ThreadPoolExecutor(len(plans)) as pool:
        outcomes = list(pool.map(lambda plan: _run(server, plan), plans))

    for plan, (ids, code) in zip(plans, outcomes, strict=True):
        assert ids == reference.chosen(model, plan.prompt, ids)
        if plan.cancel_after is None:
            assert (len(ids), code) == (plan.tokens, "OK")
        else:
            assert plan.cancel_after <= len(ids) <= plan.tokens
            assert code == "CANCELLED"
    server.admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest())
    until(lambda: server.metrics()["tessera_kv_blocks_used"] == 0)
    assert server.admin.GetLoad(admin_pb2.GetLoadRequest()).kv_blocks_cached == 0


def test_counters_equal_the_clients_counts(server: Server) -> None:
    before = server.metrics()
    source = random.Random(5)
    plans = [
        Plan(tuple(source.randrange(1, VOCABULARY) for _ in range(source.randint(1, 12))), source.randint(1, 5), None)
        for _ in range(1000)
    ]

    def call(plan: Plan) -> tuple[str, int, int, str]:
        try:
            request = _request(plan)
            if plan.tokens == 5:
                request.sampling.top_p = 7.0
            answer = server.inference.Generate(request, timeout=400)
        except grpc.RpcError as error:
            return error.code().name, 0, 0, ""
        usage = answer.completions[0].finish.usage
        return "OK", usage.prompt_tokens, usage.completion_tokens, str(answer.completions[0].finish.reason)

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(call, plans))
    codes = Counter(code for code, *_ in answers)
    assert set(codes) == {"OK", "INVALID_ARGUMENT"}

    # A call is counted when it has ended, which may be a moment after its answer came.
    ended = [f'tessera_requests_total{{code="{code}",method="Generate"}}' for code in codes]
    until(lambda: sum(server.metrics()[name] - before[name] for name in ended) >= len(plans))
    after = server.metrics()

    def grew(name: str) -> float:
        return after[name] - before[name]

    for code, count in codes.items():
        assert grew(f'tessera_requests_total{{code="{code}",method="Generate"}}') == count
    assert grew("tessera_prompt_tokens_total") == sum(prompt for _, prompt, _, _ in answers)
    assert grew("tessera_generation_tokens_total") == sum(tokens for _, _, tokens, _ in answers)
    assert grew('tessera_request_finished_total{reason="length"}') == codes["OK"]
    assert grew("tessera_time_to_first_token_seconds_count") == codes["OK"]
    assert grew("tessera_e2e_request_latency_seconds_count") == codes["OK"]
    assert after["tessera_num_requests_running"] == 0
