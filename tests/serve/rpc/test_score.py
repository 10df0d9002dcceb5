"""Log-likelihoods of given text."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from serve.v1 import admin_pb2, inference_pb2
from tests.serve.fake_executor import fake_logprob, prefix_digest
from tests.serve.rpc.running import RunningServer, serving, tokenizer
from tests.serve.rpc.test_validation import violations
from tests.serve.runtime.ranks import PATIENCE_SECONDS


def logprobs(ids: list[int] | tuple[int, ...]) -> list[float]:
    """The fake model's logprob of every id after the first."""
    return [fake_logprob(prefix_digest(ids[:place]), ids[place], 0).logprob for place in range(1, len(ids))]


async def score(server: RunningServer, *items: dict[str, Any], **fields: Any) -> Any:
    return await server.inference.Score(inference_pb2.ScoreRequest(items=items, **fields))


async def test_ids_are_scored_after_the_first() -> None:
    async with serving() as server:
        answer = await score(server, {"token_ids": {"ids": [5, 6, 7, 8]}}, request_id="mine")
        result = answer.results[0]
        assert answer.request_id == "mine"
        assert [token.token_id for token in result.tokens] == [5, 6, 7, 8]
        assert not result.tokens[0].HasField("logprob")
        assert [token.logprob for token in result.tokens[1:]] == logprobs([5, 6, 7, 8])
        assert result.sum == pytest.approx(sum(logprobs([5, 6, 7, 8])))
        assert result.usage.prompt_tokens == 4
        assert result.usage.completion_tokens == 0


async def test_a_context_is_not_scored_itself() -> None:
    async with serving() as server:
        answer = await score(server, {"context_ids": {"ids": [5, 6]}, "token_ids": {"ids": [7, 8]}}, top_logprobs=2)
        result = answer.results[0]
        assert [token.token_id for token in result.tokens] == [7, 8]
        assert [token.logprob for token in result.tokens] == logprobs([5, 6, 7, 8])[1:]
        assert [len(token.top) for token in result.tokens] == [2, 2]


async def test_context_and_target_are_tokenised_together_with_the_space_in_the_target() -> None:
    async with serving() as server:
        texts = [("The quick brown ", "fox jumps"), ("The quick brown", " fox jumps")]
        answer = await score(server, *({"context_text": context, "text": text} for context, text in texts))
        whole = tokenizer().encode("The quick brown fox jumps")
        context = tokenizer().encode("The quick brown")
        for result in answer.results:
            assert [token.token_id for token in result.tokens] == list(whole[len(context) :])
            assert result.sum == pytest.approx(sum(logprobs(whole)[len(context) - 1 :]))


async def test_greedy_is_told_by_the_ranks_of_the_tokens() -> None:
    async with serving() as server:
        # The fake model's rank of a token is 1 + id modulo 7.
        answer = await score(server, {"token_ids": {"ids": [5, 7, 14]}}, {"token_ids": {"ids": [5, 7, 15]}})
        assert [result.is_greedy for result in answer.results] == [True, False]


async def test_many_items_come_back_in_order_and_nothing_is_left_behind() -> None:
    async with serving(admission={"max_queued_requests": 20}) as server:
        items = [{"token_ids": {"ids": [5, n, n + 1]}} for n in range(100)]
        answer = await score(server, *items)
        sums = [sum(logprobs([5, n, n + 1])) for n in range(100)]
        assert [result.sum for result in answer.results] == pytest.approx(sums)
        assert (await server.gateway.load()).kv_blocks_used == 0


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "items"),
    ({"items": [{"text": ""}]}, "items[0].text"),
    ({"items": [{"token_ids": {"ids": []}}]}, "items[0].token_ids.ids"),
    ({"items": [{"text": "x"}, {}]}, "items[1]"),
    ({"items": [{"token_ids": {"ids": [5, 10_000]}}]}, "items[0].token_ids.ids[1]"),
    ({"items": [{"context_ids": {"ids": [10_000]}, "token_ids": {"ids": [5]}}]}, "items[0].context_ids.ids[0]"),
    ({"items": [{"context_text": "x", "token_ids": {"ids": [5]}}]}, "items[0].context_text"),
    ({"items": [{"context_ids": {"ids": [5]}, "text": "x"}]}, "items[0].context_ids"),
    ({"items": [{"token_ids": {"ids": [5] * 300}}]}, "items[0]"),
    ({"items": [{"text": "x"}] * 1025}, "items"),
    ({"items": [{"text": "x"}], "top_logprobs": 2**32 - 1}, "top_logprobs"),
    ({"items": [{"text": "x"}], "priority": -(2**31)}, "priority"),
    ({"items": [{"text": "x"}], "special_tokens": 55}, "special_tokens"),
    ({"items": [{"text": "x" * 3_000_000}] * 2}, "items"),
]


async def test_each_broken_rule_names_its_field() -> None:
    async with serving() as server:
        for fields, field in BAD:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await server.inference.Score(inference_pb2.ScoreRequest(**fields))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, fields
            assert field in violations(caught.value), field
        assert server.ranks.num_steps == 0


async def test_one_item_that_breaks_ends_the_call_and_frees_the_others() -> None:
    async with serving(fault_token=13) as server:
        server.ranks.go.clear()
        items = [{"token_ids": {"ids": [5, 6]}} for _ in range(5)]
        call = asyncio.ensure_future(score(server, *items, request_id="s"))
        await server.until(lambda: server.gateway.num_in_flight == 5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await score(server, *items[:3], request_id="s")
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        server.ranks.go.set()
        assert len((await call).results) == 5
        await server.until_stats(lambda stats: stats.kv_blocks_used == 0)


async def many_items_under_way(server: RunningServer) -> tuple[list[Any], asyncio.Future[Any]]:
    """A scoring call named ``s``, as many items of which as may be are with ranks that stand still."""
    server.ranks.go.clear()
    items = [{"token_ids": {"ids": [5, 6]}} for _ in range(40)]
    call = asyncio.ensure_future(score(server, *items, request_id="s"))
    await server.until(lambda: server.gateway.num_in_flight == 16)
    return items, call


async def is_aborted(server: RunningServer, call: asyncio.Future[Any]) -> None:
    """The call ends by its name, and nothing of it is left."""
    await server.admin.Abort(admin_pb2.AbortRequest(request_id="s"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    server.ranks.go.set()
    await server.until(lambda: server.gateway.num_in_flight == 0)


async def test_a_scoring_call_is_aborted_by_its_one_name() -> None:
    async with serving() as server:
        _, call = await many_items_under_way(server)
        await is_aborted(server, call)


async def test_a_call_refused_for_its_name_leaves_the_one_that_has_it_to_be_aborted() -> None:
    async with serving() as server:
        items, call = await many_items_under_way(server)
        async with asyncio.timeout(PATIENCE_SECONDS):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await score(server, *items, request_id="s")
        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert server.gateway.num_in_flight == 16, "nothing of it was begun"
        await is_aborted(server, call)
        assert len((await score(server, *items, request_id="s")).results) == 40, "the name is free again"


async def test_a_model_whose_numbers_are_not_finite_scores_nothing_and_is_counted() -> None:
    async with serving(fault_token=7) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await score(server, {"token_ids": {"ids": [5, 6]}}, {"token_ids": {"ids": [5, 7, 8]}})
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "not finite" in str(caught.value.details())
        assert server.metrics.registry.get_sample_value("tessera_nonfinite_requests_total") == 1
        answer = await score(server, {"token_ids": {"ids": [5, 6, 8]}})
        assert answer.results[0].sum == pytest.approx(sum(logprobs([5, 6, 8])))
