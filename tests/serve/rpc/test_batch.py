"""Many requests on one call."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator

import grpc
import pytest

from serve.errors import RequestAborted
from serve.rpc import convert, messages
from serve.rpc.batch import run_batch
from serve.rpc.convert import Call
from serve.rpc.model import Models
from serve.runtime.stream import Stream
from serve.types import Event, Generation, SequenceFinished
from serve.v1 import inference_pb2
from tests.serve.fake_executor import expected_tokens
from tests.serve.rpc.running import request, serving
from tests.serve.runtime.ranks import LOSING

WHO = ("good", "bad")


def _unheard(event: Event) -> None:
    pass


async def feed(messages: list[inference_pb2.GenerateRequest]) -> AsyncIterator[inference_pb2.GenerateRequest]:
    for message in messages:
        yield message


async def test_requests_of_one_call_run_together_and_are_told_apart() -> None:
    async with serving() as server:
        messages = [request((5, n + 1), 5 + n % 7, request_id=f"r{n}", sampling={"seed": n}) for n in range(40)]
        ids: dict[str, list[int]] = defaultdict(list)
        kinds: dict[str, list[str]] = defaultdict(list)
        async for event in server.inference.GenerateBatch(feed(messages)):
            ids[event.request_id].extend(event.delta.token_ids)
            kinds[event.request_id].append(event.WhichOneof("event"))
        for n in range(40):
            assert ids[f"r{n}"] == expected_tokens((5, n + 1), 5 + n % 7, seed=n, vocab_size=server.vocab_size)
            assert kinds[f"r{n}"][0] == "prompt"
            assert kinds[f"r{n}"][-1] == "finish"
        assert server.count("GenerateBatch", "OK") == 1


async def test_one_bad_request_does_not_end_the_others() -> None:
    async with serving(fault_token=13) as server:
        messages = [
            request((5,), 6, request_id="good", sampling={"seed": 1}),
            request((5,), 6, request_id="bad", sampling={"temperature": float("nan")}),
            request((13,), 6, request_id="breaks"),
            request((5,), 6, request_id="elsewhere", model="other"),
            request((7,), 6, request_id="last", sampling={"seed": 1}),
        ]
        events = [event async for event in server.inference.GenerateBatch(feed(messages))]
        ends = {event.request_id: event for event in events if event.WhichOneof("event") in ("finish", "error")}
        assert {name for name, event in ends.items() if event.WhichOneof("event") == "finish"} == {"good", "last"}
        assert ends["bad"].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert [violation.field for violation in ends["bad"].error.violations] == ["sampling.temperature"]
        assert ends["bad"].error.reason == "INVALID_REQUEST"
        assert ends["breaks"].error.code == grpc.StatusCode.INTERNAL.value[0]
        assert ends["elsewhere"].error.code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_a_request_that_meets_a_defect_ends_with_one_event_too_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = messages.event_message

    async def broken(event: SequenceFinished, generation: Generation) -> inference_pb2.GenerateEvent:
        if generation.request_id == "bad" and isinstance(event, SequenceFinished):
            raise KeyError("a defect")
        return await told(event, generation)

    monkeypatch.setattr(messages, "event_message", broken)
    async with serving() as server:
        events = [event async for event in server.inference.GenerateBatch(feed([request((5,), 3, request_id=n) for n in WHO]))]
        ends = [(e.request_id, e.WhichOneof("event")) for e in events if e.WhichOneof("event") in ("finish", "error")]
        assert sorted(ends) == [("bad", "error"), ("good", "finish")]
        broke = next(event.error for event in events if event.WhichOneof("event") == "error")
        assert (broke.code, broke.reason) == (grpc.StatusCode.INTERNAL.value[0], "REQUEST_BROKE")
        assert "a defect" not in broke.message
        await server.until_stats(lambda stats: stats.kv_blocks_used == 0)
    logged = [record for record in caplog.records if getattr(record, "request_id", None) == "bad"]
    assert [record.exc_info[0] for record in logged if record.exc_info] == [KeyError]


async def test_a_defect_behind_the_last_event_of_a_request_adds_none() -> None:
    async with serving() as server:
        start_of = server.gateway.start

        async def start(message: inference_pb2.GenerateRequest) -> tuple[Generation, Stream]:
            generation = await convert.to_generation(message, Models(server.gateway).current(), Call(0.0, None, ""))
            return generation, start_of(generation)

        def leave(stream: Stream) -> None:
            stream.close()
            raise KeyError("a defect")

        answers = run_batch(feed([request((5,), 3)]), start, _unheard, leave, server.gateway.config)
        ends = [event.WhichOneof("event") async for event in answers]
        assert ends.count("finish") == 1
        assert "error" not in ends


async def test_bytes_that_are_no_request_are_an_error_event_of_that_request() -> None:
    async with serving() as server:

        async def raw() -> AsyncIterator[bytes]:
            yield request(request_id="good").SerializeToString()
            yield inference_pb2.GenerateRequest(request_id="bad").SerializeToString() + b"\x1a\x01\xff"

        call = server.channel.stream_stream(
            "/serve.v1.Inference/GenerateBatch",
            request_serializer=bytes,
            response_deserializer=inference_pb2.GenerateEvent.FromString,
        )
        ends = {event.request_id: event.WhichOneof("event") async for event in call(raw())}
        assert ends == {"good": "finish", "bad": "error"}


async def test_a_client_may_send_more_than_the_queue_holds() -> None:
    async with serving(scheduler={"max_num_seqs": 2}, admission={"max_queued_requests": 3}) as server:
        messages = [request((5,), 2, request_id=f"r{n}") for n in range(60)]
        ends = [event.WhichOneof("event") async for event in server.inference.GenerateBatch(feed(messages))]
        assert ends.count("finish") == 60
        assert "error" not in ends


async def test_a_request_is_read_when_there_is_room_for_it_and_not_before() -> None:
    """So none is known to the server that nobody could end by its name."""
    async with serving(admission={"max_queued_requests": 1}) as server:
        read: list[str] = []

        async def sent() -> AsyncIterator[inference_pb2.GenerateRequest]:
            for name in ("first", "second"):
                read.append(name)
                yield request((5,), 2, request_id=name)

        began: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()

        async def start(message: inference_pb2.GenerateRequest) -> tuple[Generation, Stream]:
            go = asyncio.get_running_loop().create_future()
            await began.put(go)
            await go
            raise RequestAborted("by a test")

        async def ends() -> list[str]:
            answers = run_batch(sent(), start, _unheard, Stream.close, server.gateway.config)
            return [event.request_id async for event in answers]

        answered = asyncio.ensure_future(ends())
        first = await began.get()
        await asyncio.sleep(0)
        assert read == ["first"]
        first.set_result(None)
        (await began.get()).set_result(None)
        assert await answered == ["first", "second"]


async def test_a_cancelled_batch_frees_everything() -> None:
    async with serving() as server:
        server.ranks.last_step = 3
        call = server.inference.GenerateBatch(feed([request((5,), 200, request_id=f"r{n}") for n in range(10)]))
        await call.read()
        await server.until(lambda: server.gateway.num_in_flight == 10)
        call.cancel()
        await server.until(lambda: server.gateway.num_in_flight == 0)
        server.ranks.last_step = None
        await server.until_stats(lambda stats: stats.kv_blocks_used == 0)
        await server.until(lambda: server.count("GenerateBatch", "CANCELLED") == 1)


async def test_requests_may_follow_answers_on_the_same_call() -> None:
    async with serving() as server:
        call = server.inference.GenerateBatch()
        for turn in range(3):
            await call.write(request((5, turn), 3, request_id="again"))
            kinds = []
            while not kinds or kinds[-1] != "finish":
                kinds.append((await call.read()).WhichOneof("event"))
            assert kinds[0] == "prompt"
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_when_the_engine_dies_each_request_is_told_and_the_call_ends_unavailable() -> None:
    async with serving(supervisor=LOSING) as server:
        server.ranks.last_step = 3
        call = server.inference.GenerateBatch(feed([request((5,), 200, request_id=f"r{n}") for n in range(3)]))
        await server.until(lambda: server.gateway.num_in_flight == 3)
        server.ranks.kill()
        errors: list[str] = []

        async def read_to_the_end() -> None:
            async for event in call:
                if event.WhichOneof("event") == "error":
                    errors.append(event.error.reason)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_the_end()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert errors == ["ENGINE_DOWN"] * 3
