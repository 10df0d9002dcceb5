"""What requests can ask for, against a real model: sampling, stopping, scoring, and input that must be refused."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from transformers import AutoTokenizer, PreTrainedModel

from serve.v1 import inference_pb2, models_pb2, tokenizer_pb2
from tests.support import reference
from tests.support.models import VOCABULARY
from tests.support.server import Server, serving, until

TEXT = "def read_config(path):"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, "--tensor-parallel-size", "2", "--max-step-tokens", "64", "--speculative-tokens", "5") as running:
        yield running


def _request(text: str = TEXT, tokens: int = 40) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(text=text)
    request.sampling.temperature = 0.0
    request.stopping.max_new_tokens = tokens
    request.stopping.ignore_eos = True
    return request


def test_nothing_of_a_server_listens_beyond_this_machine(server: Server) -> None:
    told = {int(server.ready[name].rstrip("/").removesuffix("/metrics").rpartition(":")[2]) for name in ("grpc", "metrics")}
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    ports = [one.laddr for process in processes for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
    assert {port.ip.removeprefix("::ffff:") for port in ports} <= {"127.0.0.1", "::1"}
    assert told <= {port.port for port in ports}


def test_a_seed_gives_the_same_tokens_whatever_else_runs(server: Server) -> None:
    def sampled(seed: int) -> list[int]:
        request = _request()
        request.sampling.temperature = 0.9
        request.sampling.top_p = 0.95
        request.sampling.seed = seed
        return list(server.inference.Generate(request, timeout=400).completions[0].token_ids)

    alone = [sampled(seed) for seed in range(4)]
    assert len({tuple(ids) for ids in alone}) == 4
    source = random.Random(0)

    def noise(_: int) -> None:
        other = inference_pb2.GenerateRequest()
        other.token_ids.ids.extend(source.randrange(1, VOCABULARY) for _ in range(source.randint(1, 90)))
        other.sampling.temperature = 1.0
        other.stopping.max_new_tokens = source.randint(1, 50)
        server.inference.Generate(other, timeout=400)

    with ThreadPoolExecutor(20) as pool:
        noises = [pool.submit(noise, i) for i in range(12)]
        together = list(pool.map(sampled, range(4)))
        for future in noises:
            future.result()
    assert together == alone


def test_sequences_share_the_prompt_and_differ(server: Server) -> None:
    request = _request(TEXT * 12, tokens=20)
    request.sampling.temperature = 1.0
    request.sampling.seed = 3
    request.sampling.num_sequences = 5
    answer = server.inference.Generate(request, timeout=400)
    assert [c.index for c in answer.completions] == list(range(5))
    assert len({tuple(c.token_ids) for c in answer.completions}) == 5
    shared = [c.finish.usage.cached_tokens for c in answer.completions]
    assert all(cached >= answer.prompt.prompt_tokens - 16 for cached in shared[1:])
    again = server.inference.Generate(request, timeout=400)
    assert [list(c.token_ids) for c in again.completions] == [list(c.token_ids) for c in answer.completions]


def test_a_request_is_answered_alike_with_proposed_tokens_and_without(server: Server) -> None:
    """Few tokens to choose from make texts that repeat themselves by chance."""
    few, before = [5, 17, 80, 301], server.metrics()
    accepted = proposed = 0
    for seed in range(6):
        request = _request("a b a b " * 4, tokens=60)
        request.speculative_tokens = 0
        request.response.logprobs = 2
        request.sampling.temperature = (0.0, 0.7, 1.5)[seed % 3]
        request.sampling.seed = seed
        request.sampling.num_sequences = 1 + seed % 2
        request.sampling.frequency_penalty = 0.05 * (seed % 2)
        request.sampling.allowed_ids.extend(few)
        request.stopping.min_new_tokens = 4 * seed
        request.stopping.stop_ids.extend(few[: seed % 2])
        plain = server.inference.Generate(request, timeout=400).completions
        request.speculative_tokens = 64  # more than the server's own limit
        guessed = server.inference.Generate(request, timeout=400).completions
        for one, other in zip(plain, guessed, strict=True):
            assert (other.text, other.token_ids, other.finish.reason) == (one.text, one.token_ids, one.finish.reason)
            assert [entry.rank for entry in other.logprobs] == [entry.rank for entry in one.logprobs]
            assert (one.finish.proposed_tokens, one.finish.accepted_tokens) == (0, 0)
            accepted += other.finish.accepted_tokens
            proposed += other.finish.proposed_tokens
    assert proposed > accepted > 20
    after = server.metrics()
    for name, count in (("proposed", proposed), ("accepted", accepted)):
        name = f"tessera_speculative_{name}_tokens_total"
        assert after[name] - before[name] == count


def test_a_stop_string_ends_the_text_before_it(server: Server, folder: Path, model: PreTrainedModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = reference.greedy(model, tokenizer(TEXT).input_ids, 40)
    text = tokenizer.decode(ids)
    middle = len(text) // 2
    stop = text[middle : middle + 7]
    request = _request()
    request.stopping.stop_strings.append(stop)
    completion = server.inference.Generate(request, timeout=400).completions[0]
    assert completion.finish.stop_string == stop
    assert completion.text == text[: text.index(stop)]
    request.stopping.include_stop = True
    events = list(server.inference.GenerateStream(request, timeout=400))
    assert "".join(event.delta.text for event in events) == text[: text.index(stop)] + stop


def test_score_is_the_models_log_likelihood(server: Server, model: PreTrainedModel) -> None:
    context, continuation = [5, 9, 20, 33], [7, 8, 120, 11, 3]
    request = inference_pb2.ScoreRequest()
    item = request.items.add()
    item.context_ids.ids.extend(context)
    item.token_ids.ids.extend(continuation)
    result = server.inference.Score(request, timeout=400).results[0]
    expected = reference.logprobs(model, context + continuation)
    values = [float(expected[len(context) + i - 1, token]) for i, token in enumerate(continuation)]
    assert [entry.logprob for entry in result.tokens] == pytest.approx(values, abs=1e-4)
    assert result.sum == pytest.approx(math.fsum(values), abs=1e-3)


def test_text_and_ids_are_transformers_own(server: Server, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "naïve café 日本語 🙂 def f(x):\n\treturn x"
    ids = list(server.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text=text)).token_ids)
    assert ids == tokenizer(text).input_ids
    assert server.tokenizer.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=ids)).text == text
    assert server.models.GetModel(models_pb2.GetModelRequest()).vocab_size == VOCABULARY


def _violations(error: grpc.RpcError) -> set[str]:
    fields = set()
    for detail in rpc_status.from_call(error).details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            fields |= {violation.field for violation in bad.field_violations}
    return fields


def _long() -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(token_ids={"ids": [5] * 600})


def _with(path: str, value: float) -> inference_pb2.GenerateRequest:
    request = _request()
    part, name = path.split(".")
    setattr(getattr(request, part), name, value)
    return request


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (_long(), "token_ids"),
        (_request(text=""), "text"),
        (inference_pb2.GenerateRequest(text="a" * 8_000_000), "text"),
        (inference_pb2.GenerateRequest(token_ids={"ids": [VOCABULARY]}), "token_ids"),
        (_with("sampling.temperature", math.nan), "sampling.temperature"),
        (_with("sampling.temperature", -1.0), "sampling.temperature"),
        (_with("sampling.top_p", 0.0), "sampling.top_p"),
        (_with("sampling.repetition_penalty", math.inf), "sampling.repetition_penalty"),
        (_with("sampling.num_sequences", 4_000_000_000), "sampling.num_sequences"),
        (_with("stopping.max_new_tokens", 4_000_000_000), "stopping.max_new_tokens"),
    ],
    ids=["long", "empty", "8MB", "vocabulary", "nan", "negative", "top_p", "inf", "num_sequences", "max_new_tokens"],
)
def test_bad_input_is_refused_by_field(server: Server, request_: inference_pb2.GenerateRequest, field: str) -> None:
    steps = server.metrics()["tessera_step_seconds_count"]
    with pytest.raises(grpc.RpcError) as refused:
        server.inference.Generate(request_, timeout=400)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert any(field in violation for violation in _violations(refused.value)), _violations(refused.value)
    assert server.metrics()["tessera_step_seconds_count"] == steps


def test_an_expired_deadline_costs_nothing(server: Server) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        server.inference.Generate(_request(tokens=400), timeout=0.001)
    assert refused.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_live_request_id_is_taken(server: Server) -> None:
    request = _request(tokens=400)
    request.request_id = "mine"

    def refusal() -> grpc.StatusCode | None:
        """Of a second call while the first one lives; ``None`` if the first one had ended when the second came."""
        call = server.inference.GenerateStream(request, timeout=400)
        next(call)
        try:
            server.inference.Generate(request, timeout=400)
        except grpc.RpcError as error:
            return error.code()
        finally:
            call.cancel()
        return None

    assert until(refusal) == grpc.StatusCode.ALREADY_EXISTS
