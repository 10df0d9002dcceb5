"""An administrator ends a request by its name, in whatever stage it is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from serve.errors import RequestAborted
from serve.rpc import model, scoring, threads
from serve.rpc.abortable import Abortable
from serve.rpc.threads import INLINE_BYTES
from serve.types import RequestId
from serve.v1 import admin_pb2, inference_pb2, tokenizer_pb2
from tests.serve.rpc.running import RunningServer, request, serving
from tests.serve.rpc.test_threads import busy
from tests.serve.rpc.test_tokens import code_of

TEXT = "a" * (INLINE_BYTES + 1)


class Held:
    """A function that waits in its thread."""

    def __init__(self) -> None:
        self.is_in = threading.Event()
        self.go = threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[int, ...]:
        self.is_in.set()
        assert self.go.wait(60)
        return (5, 6)


async def waits(held: Abortable, name: str) -> None:
    with held.named(name):
        await asyncio.get_running_loop().create_future()


async def test_all_work_of_a_name_is_ended_once_and_a_client_that_goes_meanwhile_has_gone() -> None:
    held = Abortable()
    works = [asyncio.ensure_future(waits(held, name)) for name in ("a", "b", "c", "b", "c")]
    await asyncio.sleep(0)
    works[2].cancel()
    assert [held.abort(RequestId(name)) for name in ("b", "b", "c", "other")] == [True, False, True, False]
    works[4].cancel()
    for place, error in ((1, RequestAborted), (3, RequestAborted), (2, asyncio.CancelledError), (4, asyncio.CancelledError)):
        with pytest.raises(error):
            await works[place]
    assert not works[0].done()
    assert held.abort(RequestId("a"))
    with pytest.raises(RequestAborted):
        await works[0]
    assert not held._works


async def test_a_task_whose_work_was_ended_goes_on_as_one_that_nobody_cancelled() -> None:
    held = Abortable()

    async def goes_on() -> int:
        with pytest.raises(RequestAborted):
            await waits(held, "a")
        task = asyncio.current_task()
        assert task is not None
        await asyncio.sleep(0)
        return task.cancelling()

    call = asyncio.ensure_future(goes_on())
    await asyncio.sleep(0)
    assert held.abort(RequestId("a"))
    assert await call == 0


async def test_an_error_of_the_works_own_is_its_end_and_the_name_is_forgotten() -> None:
    held = Abortable()
    for name in ("a", "a", ""):
        with pytest.raises(KeyError), held.named(name):
            raise KeyError("no")
    assert not held.abort(RequestId("a"))
    assert not held._works


def generated(running: RunningServer) -> Any:
    return running.inference.Generate(request(text=TEXT, request_id="mine"))


def streamed(running: RunningServer) -> Any:
    return running.inference.GenerateStream(request(text=TEXT, request_id="mine"))


def scored(running: RunningServer) -> Any:
    return running.inference.Score(inference_pb2.ScoreRequest(request_id="mine", items=[{"text": TEXT}]))


async def abort(running: RunningServer) -> grpc.StatusCode:
    return await code_of(running.admin.Abort(admin_pb2.AbortRequest(request_id="mine")))


async def nothing_was_begun(running: RunningServer) -> None:
    """The threads have given back what they had, the name is nobody's, and the engine was handed nothing."""
    texts = [running.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text=TEXT)) for _ in range(4)]
    assert [await code_of(text) for text in texts] == [grpc.StatusCode.OK] * 4
    assert await abort(running) is grpc.StatusCode.NOT_FOUND
    assert (running.gateway.num_in_flight, running.ranks.num_steps) == (0, 0)


@pytest.mark.parametrize("call", [generated, streamed, scored])
async def test_what_waits_for_a_thread_for_texts_is_ended_and_leaves_the_line(call: Any) -> None:
    async with serving() as running:
        with busy(threads._text_threads, 2):
            waiting = call(running)
            await running.until(lambda: threads._text_threads.num_waiting("") == 1)
            assert await abort(running) is grpc.StatusCode.OK
            assert await code_of(waiting) is grpc.StatusCode.CANCELLED
            assert threads._text_threads.num_waiting("") == 0
        await nothing_was_begun(running)


async def is_ended_in_its_thread(call: Any, held: Held, patch: pytest.MonkeyPatch) -> None:
    """What a thread does for a call is held, and the call is ended meanwhile: nothing comes of it."""
    async with serving() as running:
        begun = call(running)
        await running.until(held.is_in.is_set)
        assert await abort(running) is grpc.StatusCode.OK
        assert await code_of(begun) is grpc.StatusCode.CANCELLED
        held.go.set()
        patch.undo()
        await nothing_was_begun(running)


@pytest.mark.parametrize("call", [generated, streamed, scored])
async def test_what_is_being_tokenised_is_ended_and_its_tokens_come_to_nothing(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    with monkeypatch.context() as patch:
        for module in (model, scoring):
            patch.setattr(module, "encode_now", held)
        await is_ended_in_its_thread(call, held, patch)


async def test_what_is_being_checked_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    with monkeypatch.context() as patch:
        patch.setattr("serve.rpc.convert._check", held)
        await is_ended_in_its_thread(generated, held, patch)


async def test_one_request_of_a_batch_is_ended_before_the_engine_has_it_and_the_others_go_on() -> None:
    async def sent() -> AsyncIterator[inference_pb2.GenerateRequest]:
        for name in ("mine", "other"):
            yield request(text=TEXT[:5000] if name == "mine" else "b", request_id=name)

    async with serving() as running:
        with busy(threads._text_threads, 2):
            call = running.inference.GenerateBatch(sent())
            await running.until(lambda: threads._text_threads.num_waiting("") == 1)
            assert await abort(running) is grpc.StatusCode.OK
            ends = {event.request_id: event async for event in call if event.WhichOneof("event") in ("finish", "error")}
        assert ends["mine"].error.reason == "REQUEST_ABORTED"
        assert ends["other"].WhichOneof("event") == "finish"


async def test_those_of_one_name_are_ended_before_the_engine_and_in_it() -> None:
    async with serving() as running:
        running.ranks.last_step = 1
        begun = running.inference.Generate(request(tokens=200, request_id="mine"))
        await running.until_held()
        with busy(threads._text_threads, 2):
            waiting = generated(running)
            await running.until(lambda: threads._text_threads.num_waiting("") == 1)
            assert await abort(running) is grpc.StatusCode.OK
            assert await code_of(waiting) is grpc.StatusCode.CANCELLED
        running.ranks.last_step = None
        assert await code_of(begun) is grpc.StatusCode.CANCELLED
