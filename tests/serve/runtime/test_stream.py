"""The stream between the engine and one client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from serve.errors import EngineDown, PutOut, RequestAborted, RequestError, ServeError, SlowReader
from serve.runtime.stream import Stream, StreamEvent
from serve.types import (
    FinishReason,
    Generation,
    PromptReady,
    RequestFailed,
    RequestId,
    SamplingParams,
    SequenceFinished,
    StoppingParams,
    Timings,
    TokensOut,
    Usage,
)

ID = RequestId("r")


@dataclass
class Watched:
    """A stream, and what it told the rest of the server."""

    stream: Stream
    aborts: list[RequestError] = field(default_factory=list)
    num_over: int = 0
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


def watched(*, buffer_events: int = 16, slow_reader_seconds: float = 60.0) -> Watched:
    result: Watched

    def over(_: Stream) -> None:
        result.num_over += 1

    def abort(_: Stream, error: RequestError) -> None:
        result.aborts.append(error)
        result.aborted.set()

    stream = Stream(
        Generation(request_id=ID, prompt_ids=(1,), sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=4)),
        buffer_events=buffer_events,
        slow_reader_seconds=slow_reader_seconds,
        abort=abort,
        over=over,
    )
    result = Watched(stream)
    return result


def prompt() -> PromptReady:
    return PromptReady(request_id=ID, prompt_tokens=1, cached_tokens=0)


def token(id_: int, index: int = 0) -> TokensOut:
    return TokensOut(request_id=ID, index=index, text=f"<{id_}>", token_ids=(id_,))


def finish(index: int = 0, *, done: bool = True) -> SequenceFinished:
    return SequenceFinished(
        request_id=ID,
        index=index,
        reason=FinishReason.LENGTH,
        matched_stop=None,
        usage=Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1),
        timings=Timings(queue_seconds=0.0, first_token_seconds=0.0, total_seconds=0.0),
        seed=0,
        request_done=done,
    )


async def read_all(stream: AsyncIterator[StreamEvent]) -> list[StreamEvent]:
    return [event async for event in stream]


async def test_events_come_in_order_and_the_stream_ends_after_the_request() -> None:
    w = watched()
    reader = asyncio.create_task(read_all(w.stream))
    for event in (prompt(), token(7), finish()):
        w.stream.feed(event)
        await asyncio.sleep(0)
    assert await reader == [prompt(), token(7), finish()]
    assert w.num_over == 1
    assert not w.aborts


async def test_a_lagging_reader_sees_the_waiting_tokens_of_a_sequence_merged() -> None:
    w = watched()
    for event in (prompt(), token(1), token(10, index=1), token(2), token(11, index=1), finish(done=False), token(12, index=1)):
        w.stream.feed(event)
    w.stream.feed(finish(index=1))
    assert await read_all(w.stream) == [
        prompt(),
        TokensOut(request_id=ID, index=0, text="<1><2>", token_ids=(1, 2)),
        TokensOut(request_id=ID, index=1, text="<10><11><12>", token_ids=(10, 11, 12)),
        finish(done=False),
        finish(index=1),
    ]


async def test_tokens_after_a_read_do_not_join_what_was_taken() -> None:
    w = watched()
    w.stream.feed(token(1))
    assert await anext(w.stream) == token(1)
    w.stream.feed(token(2))
    w.stream.feed(finish())
    assert await read_all(w.stream) == [token(2), finish()]


async def test_a_failure_comes_after_the_events_before_it() -> None:
    w = watched()
    w.stream.feed(token(1))
    w.stream.feed(RequestFailed(request_id=ID, error=EngineDown("gone")))
    w.stream.feed(token(2))
    assert await anext(w.stream) == token(1)
    with pytest.raises(EngineDown, match="gone"):
        await anext(w.stream)
    assert w.num_over == 1
    assert not w.aborts, "the engine ended it; there is nothing to abort"


async def test_closing_aborts_a_live_request_once() -> None:
    w = watched()
    w.stream.feed(token(1))
    w.stream.close()
    w.stream.close()
    assert [type(error) for error in w.aborts] == [RequestAborted]
    assert w.num_over == 1
    with pytest.raises(RequestAborted):
        await anext(w.stream)


async def test_closing_a_finished_request_aborts_nothing() -> None:
    w = watched()
    w.stream.feed(finish())
    w.stream.close()
    assert not w.aborts
    assert w.num_over == 1


async def test_a_reader_that_stays_behind_loses_the_call() -> None:
    w = watched(buffer_events=16, slow_reader_seconds=0.01)
    for id_ in range(40):
        w.stream.feed(token(id_))
    await w.aborted.wait()
    assert [type(error) for error in w.aborts] == [SlowReader]
    with pytest.raises(SlowReader, match="16 events behind"):
        await anext(w.stream)


async def test_a_reader_that_catches_up_keeps_the_call() -> None:
    w = watched(buffer_events=16, slow_reader_seconds=0.01)
    for id_ in range(16):
        w.stream.feed(token(id_))
    assert len((await anext(w.stream)).token_ids) == 16  # type: ignore[union-attr]
    later = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.03, later.set_result, None)
    await later  # a timer that was due long before has had its turn
    assert not w.stream.ended
    w.stream.close()


async def test_a_reader_waiting_when_the_stream_is_closed_is_woken() -> None:
    w = watched()
    reader = asyncio.create_task(anext(w.stream))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    w.stream.close()
    with pytest.raises(RequestAborted):
        await reader


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (PutOut("another came", reason="requests", retry_after_seconds=1.0), True),
        (EngineDown("a rank died"), True),
        (RequestAborted("by an administrator"), False),
    ],
)
async def test_a_request_is_refused_if_it_ends_for_want_of_room_before_its_prompt_is_computed(
    error: ServeError, refused: bool
) -> None:
    early, late = watched().stream, watched().stream
    late.feed(prompt())
    for stream in (early, late):
        assert not stream.is_refused
        stream.fail(error)
    assert (early.is_refused, late.is_refused) == (refused, False)
