"""How calls end when they do not end by themselves: cancelled, expired, refused, and the engine lost."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from serve.rpc.status import DETAILS_KEY
from serve.runtime.state import State
from serve.v1 import inference_pb2
from tests.serve.fake_executor import expected_tokens
from tests.serve.rpc.running import request, serving, state_is
from tests.serve.runtime.ranks import LOSING

LONG = 200


async def test_a_cancelled_stream_frees_its_blocks_and_is_counted() -> None:
    async with serving() as server:
        server.ranks.last_step = 3
        call = server.inference.GenerateStream(request(tokens=LONG))
        await call.read()
        call.cancel()
        await server.until(lambda: server.gateway.num_in_flight == 0)
        server.ranks.last_step = None
        await server.until_stats(lambda stats: stats.kv_blocks_used == 0 and stats.num_running == 0)
        await server.until(lambda: server.count("GenerateStream", "CANCELLED") == 1)
        assert server.gateway.num_in_flight == 0


async def test_a_cancelled_unary_call_frees_its_blocks_too() -> None:
    async with serving() as server:
        server.ranks.go.clear()
        call = server.inference.Generate(request(tokens=LONG))
        running = asyncio.ensure_future(call.code())
        await server.until(lambda: server.gateway.num_in_flight == 1)
        call.cancel()
        assert await running is grpc.StatusCode.CANCELLED
        await server.until(lambda: server.gateway.num_in_flight == 0)
        server.ranks.go.set()
        await server.until_stats(lambda stats: stats.kv_blocks_used == 0)
        await server.until(lambda: server.count("Generate", "CANCELLED") == 1)


async def test_a_client_that_vanishes_frees_its_blocks() -> None:
    async with serving() as server:
        channel = grpc.aio.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)])
        stub = type(server.inference)(channel)
        server.ranks.last_step = 3
        call = stub.GenerateStream(request(tokens=LONG))
        await call.read()
        await channel.close()
        await server.until(lambda: server.gateway.num_in_flight == 0)
        server.ranks.last_step = None
        await server.until_stats(lambda stats: stats.kv_blocks_used == 0)


async def test_a_deadline_while_running_ends_the_call_and_frees_its_blocks() -> None:
    async with serving() as server:
        server.ranks.go.clear()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.inference.Generate(request(tokens=LONG), timeout=0.1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await server.until(lambda: server.gateway.num_in_flight == 0)
        server.ranks.go.set()
        await server.until_stats(lambda stats: stats.kv_blocks_used == 0)
        await server.until(lambda: server.count("Generate", "DEADLINE_EXCEEDED") == 1)


async def test_a_request_that_expires_while_queued_costs_no_step() -> None:
    async with serving(scheduler={"max_num_seqs": 1}) as server:
        server.ranks.go.clear()
        first = asyncio.ensure_future(server.inference.Generate(request(tokens=3)))
        await server.until(lambda: server.gateway.num_in_flight == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.inference.Generate(request((9, 9, 9), LONG), timeout=0.1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await server.until(lambda: server.gateway.num_in_flight == 1)
        server.ranks.go.set()
        await first
        assert server.ranks.num_steps <= 4  # the first request's, and at most one that only forgets


async def test_an_expired_deadline_does_no_work() -> None:
    async with serving() as server:
        for timeout in (0.0, -1.0, 1e-9, 1e-6, 1e-4) * 4:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await server.inference.Generate(request(), timeout=timeout)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert server.ranks.num_steps == 0


async def test_a_full_queue_is_resource_exhausted_with_retry_info() -> None:
    async with serving(scheduler={"max_num_seqs": 1}, admission={"max_queued_requests": 1}) as server:
        server.ranks.go.clear()
        calls = [asyncio.ensure_future(server.inference.Generate(request(tokens=2))) for _ in range(6)]
        # Each has arrived: it waits behind the step that waits for us, or was refused before that step began.
        await server.until(lambda: server.gateway.num_in_flight + sum(call.done() for call in calls) == 6)
        server.ranks.go.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
        assert 1 <= len(refused) < 6
        for error in refused:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            rich = status_pb2.Status.FromString(dict(error.trailing_metadata())[DETAILS_KEY])
            retry = error_details_pb2.RetryInfo()
            assert any(detail.Unpack(retry) for detail in rich.details)
            assert retry.retry_delay.ToMilliseconds() > 0
        assert server.count("Generate", "RESOURCE_EXHAUSTED") == len(refused)
        assert server.count("Generate", "OK") == 6 - len(refused)


async def test_while_the_model_loads_calls_are_unavailable() -> None:
    async with serving(prepare=lambda ranks: ranks.loaded.clear(), wait=False) as server:
        await server.until(lambda: server.lives)
        for call in (server.inference.Generate(request()), server.models.ListModels(_list())):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        server.ranks.loaded.set()
        await server.gateway.until_serving()
        await server.inference.Generate(request())


async def test_when_a_rank_dies_calls_end_unavailable_and_the_server_comes_back_exact() -> None:
    async with serving(supervisor=LOSING) as server:
        server.ranks.last_step = 3
        stream = server.inference.GenerateStream(request(tokens=LONG))
        unary = asyncio.ensure_future(server.inference.Generate(request(tokens=LONG)))
        await server.until(lambda: server.gateway.num_in_flight == 2)
        server.ranks.kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unary
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await server.until(lambda: len(server.lives) == 2 and server.gateway.state is State.SERVING)
        answer = await server.inference.Generate(request((5, 6, 7), 9, sampling={"seed": 8}))
        wanted = expected_tokens((5, 6, 7), 9, seed=8, vocab_size=server.vocab_size)
        assert list(answer.completions[0].token_ids) == wanted


async def test_draining_refuses_new_calls_and_lets_the_others_finish() -> None:
    async with serving() as server:
        server.ranks.go.clear()
        call = asyncio.ensure_future(server.inference.Generate(request(tokens=20)))
        await server.until(lambda: server.gateway.num_in_flight == 1)
        draining = asyncio.ensure_future(server.gateway.drain())
        await server.until(state_is(server, State.DRAINING))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.inference.Generate(request())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        server.ranks.go.set()
        assert len((await call).completions[0].token_ids) == 20
        await draining


async def test_a_scoring_call_under_way_is_drained_whole() -> None:
    async with serving() as server:
        server.ranks.go.clear()
        items = [{"token_ids": {"ids": [5, 6, n]}} for n in range(40)]
        call = asyncio.ensure_future(server.inference.Score(inference_pb2.ScoreRequest(items=items)))
        await server.until(lambda: server.gateway.num_in_flight == 16)
        draining = asyncio.ensure_future(server.gateway.drain())
        await server.until(state_is(server, State.DRAINING))
        server.ranks.go.set()
        assert len((await call).results) == 40, "also the items that no step had begun"
        await draining


async def test_a_bug_is_internal_and_tells_the_client_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as server:

        def broken(generation: object, edition: object) -> None:
            raise ZeroDivisionError("a secret path")

        monkeypatch.setattr(server.gateway, "start", broken)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.inference.Generate(request())
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in caught.value.details()
        assert "ZeroDivisionError" in caplog.text


async def test_every_call_is_counted_once_under_its_code() -> None:
    async with serving() as server:
        for _ in range(5):
            await server.inference.Generate(request())
            assert [event async for event in server.inference.GenerateStream(request())]
        with pytest.raises(grpc.aio.AioRpcError):
            await server.inference.Generate(request(model="other"))
        assert server.count("Generate", "OK") == 5
        assert server.count("GenerateStream", "OK") == 5
        assert server.count("Generate", "NOT_FOUND") == 1


async def test_random_cancels_leave_nothing_behind_and_harm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(5)
    async with serving(scheduler={"max_step_tokens": 32}) as server:
        finished = cancelled = 0

        async def one(number: int) -> None:
            nonlocal finished, cancelled
            prompt = tuple(rng.randrange(1, 300) for _ in range(rng.randrange(1, 30)))
            tokens, leaves_after = rng.randrange(1, 40), rng.choice((0, 0, 1, 4)) if number % 3 == 0 else None
            call = server.inference.GenerateStream(request(prompt, tokens, sampling={"seed": number}))
            ids: list[int] = []
            num_read = 0
            while (event := await call.read()) is not grpc.aio.EOF:
                ids.extend(event.delta.token_ids)
                if num_read == leaves_after and call.cancel():
                    cancelled += 1
                    return
                num_read += 1
            assert ids == expected_tokens(prompt, tokens, seed=number, vocab_size=server.vocab_size)
            finished += 1

        for _ in range(3):
            await asyncio.gather(*(one(number) for number in range(64)))
        await server.until(lambda: server.gateway.num_in_flight == 0)
        await server.gateway.flush_prefix_cache()
        await server.until_stats(lambda stats: stats.kv_blocks_used == stats.num_running == stats.num_waiting == 0)
        await server.until(
            lambda: server.count("GenerateStream", "OK") + server.count("GenerateStream", "CANCELLED") == finished + cancelled
        )
        assert finished > 100
        assert cancelled > 10
        assert server.count("GenerateStream", "OK") >= finished  # a call may have ended just before its cancellation came
        assert not [record for record in caplog.records if record.levelname == "ERROR"]


def _list() -> object:
    from serve.v1 import models_pb2

    return models_pb2.ListModelsRequest()
