"""Calls that their client ended: by its deadline, or by a cancel."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from serve.errors import DeadlineExpired, RequestAborted, RequestError
from serve.rpc import scoring
from serve.rpc.audit import NoBooks
from serve.rpc.batch import run_batch
from serve.rpc.bounds import request_bounds
from serve.rpc.deadlines import is_expired, leave, rounding_seconds
from serve.rpc.decoding import Reader
from serve.rpc.methods import Calls, _Behaviour
from serve.rpc.scoring import Scorer
from serve.runtime.stream import Stream
from serve.tracing.seam import NoTracing
from serve.types import Generation, RequestId, SamplingParams, StoppingParams
from serve.v1 import inference_pb2
from tests.serve.rpc.running import config_of

METHOD = inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods_by_name["Generate"]


class Context:
    """A call whose time is told by the test."""

    def __init__(self, allowed: float | None) -> None:
        self.remaining = allowed
        self.is_over = False

    def time_remaining(self) -> float | None:
        return self.remaining

    def done(self) -> bool:
        return self.is_over

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        pass


async def counted(allowed: float | None, remaining: float | None, *, by_write: bool) -> str:
    """The code that a call is counted under whose client ends it with so much time left."""
    codes: list[str] = []
    context = Context(allowed)
    begun = asyncio.Event()

    async def handler(request: object, context: Context) -> None:
        begun.set()
        await asyncio.sleep(3600)

    async def writing(request: object, context: Context) -> None:
        context.remaining, context.is_over = remaining, True
        raise RuntimeError("the call is over")

    reader = Reader(inference_pb2.GenerateRequest, request_bounds(config_of().admission))
    chosen = writing if by_write else handler

    def count(method: str, code: str) -> None:
        codes.append(code)

    behaviour = _Behaviour(METHOD, chosen, reader, count, Calls(), NoTracing(), NoBooks(), None)
    call = asyncio.ensure_future(behaviour.unary(inference_pb2.GenerateRequest(), context))
    if not by_write:
        await begun.wait()
        context.remaining = remaining
        call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    (code,) = codes
    return code


@pytest.mark.parametrize(
    ("allowed", "remaining", "code"),
    [
        (2.0, -0.001, "DEADLINE_EXCEEDED"),
        (2.0, 0.008, "DEADLINE_EXCEEDED"),  # rounded up on the wire, and a moment under way
        (60.0, 0.34, "DEADLINE_EXCEEDED"),
        (60.0, 0.6, "CANCELLED"),
        (0.05, 0.01, "DEADLINE_EXCEEDED"),
        (0.0205, 0.0152, "DEADLINE_EXCEEDED"),  # seen of calls with 20 ms and 6 ms, on busy processors
        (0.0056, 0.0038, "DEADLINE_EXCEEDED"),
        (0.2, 0.12, "CANCELLED"),
        (2.0, 1.0, "CANCELLED"),
        (60.0, 3.0, "CANCELLED"),
        (None, None, "CANCELLED"),
    ],
)
@pytest.mark.parametrize("by_write", [False, True])
async def test_a_client_whose_deadline_passed_is_told_from_one_that_cancelled(
    allowed: float | None, remaining: float | None, code: str, by_write: bool
) -> None:
    assert await counted(allowed, remaining, by_write=by_write) == code


def test_a_call_of_some_length_may_be_cancelled_in_the_first_third_of_its_time() -> None:
    for allowed in (0.15, 1.0, 10.0, 1000.0):
        assert not is_expired(allowed * 0.67, allowed)
        assert is_expired(allowed * 0.01, allowed)


@pytest.mark.parametrize(("remaining", "error"), [(0.008, DeadlineExpired), (1.5, RequestAborted)])
@pytest.mark.parametrize("method", ["GenerateBatch", "Score"])
async def test_the_requests_of_a_call_end_for_the_same_reason_as_the_call(
    method: str, remaining: float, error: type[RequestError]
) -> None:
    """``tessera_request_finished_total`` tells by this error ``deadline`` from ``cancelled``."""
    ends: list[RequestError] = []
    generation = Generation(
        request_id=RequestId("r"),
        prompt_ids=(5,),
        sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=4),
        arrival_seconds=10.0,
        deadline_seconds=12.0,
    )
    stream = Stream(
        generation, buffer_events=4, slow_reader_seconds=60.0, abort=lambda _, why: ends.append(why), over=lambda _: None
    )
    begun = asyncio.Event()

    def start(_: Generation) -> Stream:
        begun.set()
        return stream

    def left(stream: Stream) -> None:
        leave(stream, 12.0 - remaining)

    async with asyncio.timeout(30):
        if method == "Score":
            scorer = Scorer(None, None, left, None)  # type: ignore[arg-type]
            sequence = scoring._Sequence(array("I", (5, 6)), 1, 2)
            work = scorer._one(inference_pb2.ScoreResult(), sequence, lambda: generation, start, asyncio.Semaphore(1))
            call = asyncio.ensure_future(work)
        else:
            events = run_batch(one_request(), lambda _: begin(start, generation), lambda _: None, left, config_of())
            call = asyncio.ensure_future(anext(events))
        await begun.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        while not ends:  # noqa: ASYNC110  # the batch's tasks are cancelled in turn
            await asyncio.sleep(0)
    assert [type(end) for end in ends] == [error]


async def one_request() -> AsyncIterator[inference_pb2.GenerateRequest]:
    yield inference_pb2.GenerateRequest()
    await asyncio.sleep(3600)


async def begin(start: Callable[[Generation], Stream], generation: Generation) -> tuple[Generation, Stream]:
    return generation, start(generation)


@pytest.mark.parametrize(
    ("timeout", "sent"),
    [
        (0.499, 0.499),
        (0.9999, 1.0),
        (1.2345, 1.24),
        (5.551, 5.56),
        (9.995, 10.0),
        (12.345, 12.4),
        (123.4, 124.0),
        (12345.0, 12400.0),
    ],
)
def test_the_rounding_of_a_timeout_is_known(timeout: float, sent: float) -> None:
    """As gRPC core 1.85 was seen to write them."""
    assert sent - timeout <= rounding_seconds(sent) * 1.001
    assert rounding_seconds(sent) <= max(0.001, 0.01 * sent)
