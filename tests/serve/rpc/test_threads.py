"""What is done beside the event loop keeps nothing else from being done, and nobody from their turn."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from serve.errors import QueueFull
from serve.rpc import threads
from serve.rpc.decoding import Malformed, Reader
from serve.rpc.room import Room
from serve.rpc.threads import INLINE_BYTES, TurnThreads, in_text_thread, off_loop
from serve.v1 import inference_pb2, tokenizer_pb2
from tests.serve.rpc.running import request, serving
from tests.serve.rpc.test_tokens import bearer, code_of, make


async def test_templates_that_do_not_end_keep_no_large_message_waiting() -> None:
    over, large = threading.Event(), tokenizer_pb2.TokenizeRequest(text="x" * (INLINE_BYTES + 1))
    waits = functools.partial(in_text_thread, lambda: over.wait(60), 1, most_waiting=8, most_bytes=1_000_000)
    templates = [asyncio.ensure_future(waits()) for _ in range(4)]
    try:
        async with asyncio.timeout(10):
            assert await off_loop(large, lambda: threading.current_thread().name.startswith("message"))
        assert not any(template.done() for template in templates)
    finally:
        over.set()
        await asyncio.gather(*templates)


@contextlib.contextmanager
def busy(turns: TurnThreads, num_threads: int) -> Iterator[None]:
    """Within, all threads are at work that does not end."""
    over, began = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        began.release()
        over.wait(60)

    pieces = [turns.submit(f"busy {place}", work, 1) for place in range(num_threads)]
    try:
        for _ in pieces:
            assert began.acquire(timeout=60)
        yield
    finally:
        over.set()
        for piece in pieces:
            piece.result(60)


def test_callers_take_turns_at_the_threads_each_in_its_own_order() -> None:
    turns, order = TurnThreads(1, "test"), []
    with busy(turns, 1):
        names = ["a1", "a2", "a3", "a4", "b1", "c1", "b2"]
        pieces = [turns.submit(name[0], lambda name=name: order.append(name), 8) for name in names]
    for piece in pieces:
        piece.result(60)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_so_much_of_a_caller_waits_and_more_is_refused_unless_something_is_given_up() -> None:
    turns = TurnThreads(2, "test")
    with busy(turns, 2):
        pieces = [turns.submit("a", lambda: None, 2) for _ in range(2)]
        with pytest.raises(QueueFull, match="2 texts of this caller wait") as refused:
            turns.submit("a", lambda: None, 2)
        assert refused.value.reason == "requests"
        other = turns.submit("b", lambda: None, 2)
        assert pieces[0].cancel()
        assert turns.num_waiting("a") == 1
        pieces.append(turns.submit("a", lambda: None, 2))
        assert pieces[1].cancel()
        assert pieces[2].cancel()
        assert (turns.num_waiting("a"), turns.num_waiting("b")) == (0, 1)
    other.result(60)
    with pytest.raises(CancelledError):
        pieces[0].result(0)
    assert turns.submit("a", lambda: 7, 1).result(60) == 7


def test_an_error_of_a_piece_is_its_callers_and_nothing_of_it_is_kept() -> None:
    turns = TurnThreads(1, "test")

    class Large:
        pass

    large = Large()
    gone = weakref.ref(large)

    def fail(what: object) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        turns.submit("a", lambda what=large: fail(what), 1).result(60)
    assert turns.submit("a", lambda: 1, 1).result(60) == 1
    del large
    gc.collect()
    assert gone() is None


async def test_large_messages_and_long_texts_that_wait_are_bounded_by_their_bytes_for_each_and_altogether(
    tmp_path: Path,
) -> None:
    file = tmp_path / "tokens.json"
    flood, other, third, fourth = (bearer(make(file, name)) for name in ("flood", "other", "third", "fourth"))
    size = 100_000
    texts, unread = threads._text_threads, threads._message_threads

    async with serving(rpc={"tokens": str(file)}, admission={"max_waiting_bytes": 5 * size + 10_000}) as running:

        def large(who: dict[str, Any]) -> Any:
            return running.inference.Generate(request(text="x" * size), **who)

        async def is_refused(call: Any) -> None:
            assert await code_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "bytes of this caller wait" in await call.details()
            assert dict(await call.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"

        calls = []
        with busy(texts, 2):
            for number in (1, 2):  # one by one: each was read before the other comes
                calls.append(large(flood))
                await running.until(lambda number=number: texts.num_waiting("flood") == number)
            await is_refused(large(flood))
            with busy(unread, 2):
                for name, who in (("other", other), ("third", third)):
                    calls.append(large(who))
                    await running.until(lambda name=name: unread.num_waiting(name) == 1)
                await is_refused(large(fourth))
        assert [await code_of(call) for call in calls] == [grpc.StatusCode.INVALID_ARGUMENT] * 4, "too long for the model"
        await running.until(lambda: not threads._room._num_bytes)
        assert running.metrics.registry.get_sample_value("tessera_rejections_total", {"reason": "bytes"}) == 2
        assert await code_of(large(fourth)) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_large_message_of_any_size_has_room_where_none_waits_and_one_of_a_batch_is_refused_by_its_name() -> None:
    turns, text = threads._message_threads, "x" * (INLINE_BYTES + 1)

    async def sent() -> AsyncIterator[inference_pb2.GenerateRequest]:
        yield request(text=text, request_id="mine")
        yield request(request_id="small")

    async with serving(admission={"max_waiting_bytes": 1}) as running:
        tokenised = tokenizer_pb2.TokenizeRequest(text=text)
        with busy(turns, 2):
            waiting = running.tokenizer.Tokenize(tokenised)
            await running.until(lambda: turns.num_waiting("") == 1)
            refused = running.tokenizer.Tokenize(tokenised)
            assert await code_of(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED
            ends = {}
            async for event in running.inference.GenerateBatch(sent()):
                if event.WhichOneof("event") in ("finish", "error"):
                    ends[event.request_id] = event
        assert (ends["mine"].error.reason, ends["mine"].error.retry_after_seconds) == ("QUEUE_FULL", 1.0)
        assert ends["small"].WhichOneof("event") == "finish"
        assert await code_of(waiting) is grpc.StatusCode.OK
        texts = threads._text_threads
        with busy(texts, 2):
            waiting = running.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text=text[:5000]))
            await running.until(lambda: texts.num_waiting("") == 1)
            assert await code_of(running.inference.Generate(request(text=text[:5000]))) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await code_of(waiting) is grpc.StatusCode.OK
        counted = running.metrics.registry.get_sample_value("tessera_rejections_total", {"reason": "bytes"})
        assert counted == 2, "of those that were to be computed"


def test_what_is_counted_for_several_is_the_same_part_for_each_and_leaves_some() -> None:
    room = Room()
    with contextlib.ExitStack() as held:
        for whose in ("a", "b", "c"):
            for _ in range(25):
                held.enter_context(room.taken(whose, 1, 100))
        with pytest.raises(QueueFull) as refused, room.taken("a", 1, 100):
            pass
        assert (refused.value.reason, refused.value.retry_after_seconds) == ("bytes", 1.0)
        held.enter_context(room.taken("d", 12, 100))
        held.enter_context(room.taken("a", 50, None))
        assert room.num_bytes("a") == 75
    assert not room._num_bytes
    with room.taken("a", 1_000, 100), pytest.raises(QueueFull), room.taken("b", 1, 100):
        pass


async def test_another_tenants_large_message_is_read_before_the_rest_of_a_flood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokens.json"
    flood, other = (bearer(make(file, name)) for name in ("flood", "other"))
    turns, read, go = threads._message_threads, [], threading.Event()

    def held(reader: Reader, data: bytes) -> Message | Malformed:
        message = tokenizer_pb2.TokenizeRequest.FromString(data)
        read.append(message.model)
        assert go.wait(60)
        return message

    monkeypatch.setattr(Reader, "_read_large", held)
    async with serving(rpc={"tokens": str(file)}) as running:

        def large(model: str, who: dict[str, Any]) -> Any:
            return running.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(model=model, text="x" * (INLINE_BYTES + 1)), **who)

        with busy(turns, 2):
            calls = [large("of the flood", flood) for _ in range(4)]
            await running.until(lambda: turns.num_waiting("flood") == 4)
            calls.append(large("another's", other))
            await running.until(lambda: turns.num_waiting("other") == 1)
        await running.until(lambda: len(read) == 2)
        assert sorted(read) == ["another's", "of the flood"]
        go.set()
        assert [await code_of(call) for call in calls] == [grpc.StatusCode.NOT_FOUND] * 5, "of models of these names"


async def test_one_tenants_texts_that_wait_are_bounded_and_keep_no_other_waiting(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    flood, other = (bearer(make(file, name)) for name in ("flood", "other"))
    turns = threads._text_threads
    chat: Any = {"messages": [{"role": "user", "content": "x"}]}
    text = tokenizer_pb2.TokenizeRequest(text="x" * 5000)
    scored = inference_pb2.ScoreRequest(items=[{"text": "x" * (INLINE_BYTES + 1)}])
    async with serving(rpc={"tokens": str(file)}, admission={"max_queued_requests": 1}) as running:
        with busy(turns, 2):
            calls = [running.inference.Generate(request(chat=chat), **flood)]
            await running.until(lambda: turns.num_waiting("flood") == 1)
            for refused in (
                running.inference.Generate(request(chat=chat), **flood),
                running.inference.Score(scored, **flood),
                running.tokenizer.Tokenize(text, **flood),
            ):
                assert await code_of(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "texts of this caller wait" in await refused.details()
            calls.append(running.tokenizer.Tokenize(text, **other))
            await running.until(lambda: turns.num_waiting("other") == 1)
        assert [await code_of(call) for call in calls] == [grpc.StatusCode.OK] * 2
        counted = running.metrics.registry.get_sample_value("tessera_rejections_total", {"reason": "requests"})
        assert counted == 2, "of the two that were to be computed"
