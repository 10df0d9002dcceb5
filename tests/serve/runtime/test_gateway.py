"""Requests through the gateway: streamed, cancelled, refused, expired, drained, and counted."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable

import pytest

from serve.engine.engine import Engine
from serve.errors import (
    DeadlineExpired,
    Draining,
    DuplicateRequest,
    InvalidRequest,
    Loading,
    QueueFull,
    RequestAborted,
    SlowReader,
)
from serve.runtime.engine_thread import EngineThread
from serve.runtime.state import State
from serve.types import FinishReason, PromptReady, RequestId
from tests.serve.runtime.ranks import PATIENCE_SECONDS, bench, expected_ids, finish_of, ids_of, read, request


async def test_a_request_streams_its_tokens_to_the_end() -> None:
    async with bench() as b:
        events, error = await read(b.gateway.start(request(tokens=20)))
        assert error is None
        assert isinstance(events[0], PromptReady)
        assert ids_of(events) == expected_ids((5, 6, 7), 20)
        assert finish_of(events).reason is FinishReason.LENGTH
        assert b.gateway.num_in_flight == 0
        assert (await b.gateway.load()).kv_blocks_used == 0


async def test_many_streams_at_once_are_each_exact() -> None:
    async with bench() as b:
        prompts = [tuple(range(1, 2 + n)) for n in range(40)]
        streams = [b.gateway.start(request(f"r{n}", prompt_ids=p, tokens=n + 1)) for n, p in enumerate(prompts)]
        results = await asyncio.gather(*(read(stream) for stream in streams))
        for n, (events, error) in enumerate(results):
            assert error is None
            assert ids_of(events) == expected_ids(prompts[n], n + 1)


async def test_a_closed_stream_frees_its_blocks_and_its_id() -> None:
    async with bench() as b:
        b.ranks.hold_after = 5
        stream = b.gateway.start(request("x", tokens=9_000))
        await b.until(lambda: b.ranks.num_steps == 5 and b.ranks.in_step.is_set())
        assert (await b.gateway.load()).kv_blocks_used > 0
        stream.close()
        again = b.gateway.start(request("x", tokens=3))  # the same id, at once
        b.ranks.open.set()
        events, error = await read(again)
        assert error is None
        assert ids_of(events) == expected_ids((5, 6, 7), 3)
        assert (await b.gateway.load()).kv_blocks_used == 0
        assert b.value("request_finished_total", reason="cancelled") == 1


async def test_a_stream_closed_before_the_engine_saw_it_costs_nothing() -> None:
    async with bench() as b:
        b.ranks.open.clear()
        other = b.gateway.start(request("other"))
        await b.until(b.ranks.in_step.is_set)
        stream = b.gateway.start(request("x", tokens=9_000))
        stream.close()
        b.ranks.open.set()
        assert (await read(other))[1] is None
        assert await b.gateway.flush_prefix_cache() == 0
        assert (await b.gateway.load()).kv_blocks_used == 0


async def test_a_reader_who_never_reads_loses_the_call_and_its_blocks() -> None:
    async with bench(rpc={"stream_buffer_events": 16, "slow_reader_seconds": 0.02}) as b:
        b.ranks.hold_after = 80  # the quick one's steps and some more: the slow one cannot come to its end
        slow = b.gateway.start(request("slow", tokens=9_000))
        events, error = await read(b.gateway.start(request("quick", tokens=50)))
        assert error is None
        assert ids_of(events) == expected_ids((5, 6, 7), 50)
        await b.until(lambda: slow.ended)
        with pytest.raises(SlowReader):
            await anext(slow)
        b.ranks.open.set()
        await b.until(lambda: b.value("request_finished_total", reason="slow_reader") == 1)
        await b.until(lambda: b.value("kv_blocks_used") == 0)


async def test_a_live_id_is_refused_and_the_live_request_goes_on() -> None:
    async with bench() as b:
        b.ranks.open.clear()
        first = b.gateway.start(request("x"))
        second = b.gateway.start(request("x"))
        b.ranks.open.set()
        assert isinstance((await read(second))[1], DuplicateRequest)
        events, error = await read(first)
        assert error is None
        assert ids_of(events) == expected_ids((5, 6, 7), 4)


async def test_what_can_never_fit_is_refused_by_field() -> None:
    async with bench() as b:
        _, error = await read(b.gateway.start(request(tokens=20_000)))
        assert isinstance(error, InvalidRequest)
        assert error.violations[0].field == "stopping.max_new_tokens"


async def test_a_full_queue_refuses_at_once_by_number_and_by_tokens() -> None:
    async with bench(admission={"max_queued_requests": 2, "max_queued_tokens": 100}, scheduler={"max_num_seqs": 1}) as b:
        b.ranks.open.clear()  # no step ends before all of these have been refused
        running = b.gateway.start(request("running"))
        await b.until(b.ranks.in_step.is_set)
        waiting = b.gateway.start(request("waiting", prompt_ids=(1,) * 60))
        with pytest.raises(QueueFull, match="60 prompt tokens are waiting, and 60 more") as full:
            b.gateway.start(request("long", prompt_ids=(1,) * 60))
        assert full.value.reason == "tokens"
        assert full.value.retry_after_seconds > 0
        also_waiting = b.gateway.start(request("also"))
        with pytest.raises(QueueFull, match="2 requests are waiting"):
            b.gateway.start(request("flood"))
        b.ranks.open.set()
        for stream in (running, waiting, also_waiting):
            assert (await read(stream))[1] is None
        assert b.value("rejections_total", reason="requests") == 1
        assert b.value("rejections_total", reason="tokens") == 1


async def test_room_in_the_queue_is_used_again_and_again() -> None:
    async with bench(admission={"max_queued_requests": 1}, scheduler={"max_num_seqs": 1}) as b:
        for number in range(20):
            _, error = await read(b.gateway.start(request(f"r{number}")))
            assert error is None


async def test_a_deadline_ends_a_request_that_waits_and_one_that_runs() -> None:
    async with bench(scheduler={"max_num_seqs": 1}) as b:
        deadline = b.clock() + 30
        b.ranks.hold_after = 3
        running = b.gateway.start(request("running", tokens=9_000, deadline_seconds=deadline))
        waiting = b.gateway.start(request("waiting", deadline_seconds=deadline))
        await b.until(b.ranks.in_step.is_set)
        b.clock.ahead_seconds = 60
        steps = b.ranks.num_steps
        b.ranks.open.set()
        events, error = await read(waiting)
        assert isinstance(error, DeadlineExpired)
        assert events == []
        assert isinstance((await read(running))[1], DeadlineExpired)
        assert b.value("request_finished_total", reason="deadline") == 2
        await b.until(lambda: b.value("kv_blocks_used") == 0)
        assert b.ranks.num_steps <= steps + 3, "the step in progress, the next, and one that tells the ranks what to forget"


async def test_an_administrator_can_abort_by_id() -> None:
    async with bench() as b:
        b.ranks.hold_after = 3
        stream = b.gateway.start(request("x", tokens=9_000))
        await b.until_held()
        asked = [b.gateway.abort(RequestId(name)) for name in ("nobody", "x", "x")]
        await b.until_told(len(asked))
        b.ranks.open.set()
        assert await asyncio.gather(*asked) == [False, True, False]
        assert isinstance((await read(stream))[1], RequestAborted)
        assert await b.gateway.abort(RequestId("x")) is False


async def test_the_prefix_cache_can_be_flushed() -> None:
    async with bench() as b:
        await read(b.gateway.start(request(prompt_ids=tuple(range(1, 50)))))
        assert await b.gateway.flush_prefix_cache() >= 3
        await b.until(lambda: b.value("kv_blocks_cached") == 0)


async def test_a_model_that_is_served_has_figures_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, run = threading.Event(), EngineThread.run

    def late(thread: EngineThread, engine: Engine, should_leave: Callable[[], bool]) -> None:
        assert goes_on.wait(PATIENCE_SECONDS)
        run(thread, engine, should_leave)

    monkeypatch.setattr(EngineThread, "run", late)
    async with bench() as b:
        try:
            assert b.gateway.stats().kv_blocks_total > 0
        finally:
            goes_on.set()


async def test_before_the_model_is_loaded_requests_are_refused() -> None:
    async with bench(lambda ranks, _: ranks.ready.clear(), wait=False) as b:
        assert b.gateway.state is State.LOADING
        with pytest.raises(Loading):
            b.gateway.start(request())
        with pytest.raises(Loading):
            await b.gateway.load()
        assert await b.gateway.abort(RequestId("x")) is False
        await b.until(lambda: b.groups)
        b.ranks.ready.set()
        await b.gateway.until_serving()
        assert b.gateway.state is State.SERVING
        assert b.gateway.facts is not None
        assert b.gateway.facts.checkpoint_step == 7
        assert (await read(b.gateway.start(request())))[1] is None
        assert b.value("rejections_total", reason="loading") == 1


async def test_a_drain_refuses_the_new_and_waits_for_what_is_in_flight() -> None:
    async with bench() as b:
        b.ranks.open.clear()
        stream = b.gateway.start(request())
        draining = asyncio.create_task(b.gateway.drain())
        await b.until_state(State.DRAINING)
        with pytest.raises(Draining):
            b.gateway.start(request("late"))
        assert not draining.done()
        b.ranks.open.set()
        events, error = await read(stream)
        assert error is None
        assert ids_of(events) == expected_ids((5, 6, 7), 4)
        await draining
        await b.gateway.drain()  # again is the same drain
        assert b.states == [State.SERVING, State.DRAINING]
        assert b.value("rejections_total", reason="draining") == 1


async def test_a_drain_that_takes_too_long_ends_the_rest() -> None:
    async with bench(rpc={"drain_seconds": 0.02}) as b:
        b.ranks.hold_after = 3
        stream = b.gateway.start(request(tokens=9_000))
        await anext(stream)
        draining = asyncio.create_task(b.gateway.drain())
        assert isinstance((await read(stream))[1], Draining)
        b.ranks.open.set()
        await draining
        await b.until(lambda: b.value("request_finished_total", reason="draining") == 1)
        await b.until(lambda: b.value("kv_blocks_used") == 0)


async def test_a_drain_of_nothing_still_takes_the_time_that_balancers_need() -> None:
    async with bench(rpc={"drain_least_seconds": 0.2}) as b:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await b.gateway.drain()
        assert loop.time() - began >= 0.19, "a timer of the loop may fire a little early"
        assert b.states[-1] is State.DRAINING


async def test_stopping_ends_every_stream_and_leaves_no_thread() -> None:
    async with bench() as b:
        b.ranks.hold_after = 3
        stream = b.gateway.start(request(tokens=9_000))
        await anext(stream)
        stopping = asyncio.create_task(b.gateway.stop())
        await b.until_state(State.STOPPED)
        b.ranks.open.set()
        await stopping
        assert isinstance((await read(stream))[1], Draining)
        assert b.gateway.state is State.STOPPED
        assert b.ranks.num_closes > 0
        assert b.ranks.started_on is not None
        assert not b.ranks.started_on.is_alive()
        with pytest.raises(Draining):
            b.gateway.start(request("late"))
        with pytest.raises(Draining):
            await b.gateway.flush_prefix_cache()


async def test_the_server_counts_what_the_clients_count() -> None:
    """Random requests, a third of them cancelled: the counters equal what was read, exactly."""
    rng = random.Random(3)
    async with bench(scheduler={"max_num_seqs": 24, "max_step_tokens": 64}) as b:

        async def one(number: int) -> tuple[int, int]:
            """(prompt tokens, completion tokens) of a request that was read to its end; zeros if it was cancelled."""
            prompt_ids = tuple(rng.randrange(1, 97) for _ in range(rng.randint(1, 60)))
            sequences, tokens = rng.choice([1, 1, 1, 3]), rng.randint(1, 30)
            stream = b.gateway.start(request(f"r{number}", prompt_ids=prompt_ids, tokens=tokens, num_sequences=sequences))
            if number % 3 == 0:
                if rng.random() < 0.5:
                    await anext(stream)
                stream.close()
                return 0, 0
            events, error = await read(stream)
            assert error is None
            for index in range(sequences):
                assert ids_of(events, index) == expected_ids(prompt_ids, tokens)
            return len(prompt_ids), sequences * tokens

        counted = await asyncio.gather(*(one(n) for n in range(90)))
        await b.until(lambda: b.value("kv_blocks_used") == 0)
        # A cancelled request may have ended by itself a moment before, or never have reached the engine.
        finished = b.value("request_finished_total", reason="length")
        assert 60 <= finished <= finished + b.value("request_finished_total", reason="cancelled") <= 90

        before = b.value("prompt_tokens_total"), b.value("generation_tokens_total")
        counted = await asyncio.gather(*(one(n) for n in range(100, 250) if n % 3))
        after = b.value("prompt_tokens_total"), b.value("generation_tokens_total")
        assert after[0] - before[0] == sum(prompt for prompt, _ in counted)
        assert after[1] - before[1] == sum(completion for _, completion in counted)
        assert b.value("request_finished_total", reason="length") - finished == 100
        assert b.value("e2e_request_latency_seconds_count") == finished + 100
        assert b.value("num_requests_running") == b.value("num_requests_waiting") == 0
