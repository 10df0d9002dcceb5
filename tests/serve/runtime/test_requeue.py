"""The ranks die, and no call does: what is in flight waits for the next ones and goes on where it was."""

from __future__ import annotations

import asyncio
import contextlib
import errno

import pytest

from serve.engine.executor import ExecutorDied
from serve.errors import Draining, EngineDown, Loading, QueueFull, RankStartError, RequestAborted
from serve.runtime import supervisor
from serve.runtime.state import State
from serve.types import RequestId
from tests.serve.runtime.ranks import FakeRanks, bench, expected_ids, finish_of, ids_of, read, request


def held_from_the_second_life_on(ranks: FakeRanks, life: int) -> None:
    if life:
        ranks.ready.clear()


async def test_a_death_under_load_costs_no_call() -> None:
    async with bench() as b:
        b.ranks.open.clear()
        streams = [b.gateway.start(request(f"r{n}", prompt_ids=(5, 6, n + 1), tokens=60)) for n in range(32)]
        b.ranks.hold_after = 4  # the second step has them all
        b.ranks.open.set()
        await b.until_held()
        b.ranks.kill()
        for n, (events, error) in enumerate(await asyncio.gather(*(read(stream) for stream in streams))):
            assert error is None
            assert ids_of(events) == expected_ids((5, 6, n + 1), 60)
            assert finish_of(events).usage.completion_tokens == 60
        assert b.states == [State.SERVING, State.DOWN, State.SERVING]
        assert b.value("engine_restarts_total") == 1
        assert b.value("requests_kept_total") == 32
        assert b.value("request_finished_total", reason="length") == 32
        assert b.value("generation_tokens_total") == 32 * 60
        assert b.value("prompt_tokens_total") == 32 * 3


async def test_requests_that_come_while_there_are_no_ranks_wait() -> None:
    async with bench(held_from_the_second_life_on) as b:
        b.ranks.kill()
        await b.until_state(State.DOWN)
        streams = [b.gateway.start(request(f"r{n}", tokens=9)) for n in range(3)]
        with b.gateway.call() as start:
            streams.append(start(request("of a call", tokens=9)))
            await b.until(lambda: len(b.groups) == 2)
            b.ranks.ready.set()
            for events, error in await asyncio.gather(*(read(stream) for stream in streams)):
                assert error is None
                assert ids_of(events) == expected_ids((5, 6, 7), 9)


async def test_no_more_of_them_than_the_queue_takes() -> None:
    sections = {"admission": {"max_queued_requests": 2}, "scheduler": {"max_num_seqs": 1}}
    async with bench(held_from_the_second_life_on, **sections) as b:
        b.ranks.kill()
        await b.until_state(State.DOWN)
        streams = []
        with contextlib.suppress(QueueFull):
            for number in range(10):
                streams.append(b.gateway.start(request(f"r{number}")))
        await b.until(lambda: len(b.groups) == 2)
        b.ranks.ready.set()
        ended = [error for _, error in await asyncio.gather(*(read(stream) for stream in streams))]
        assert ended[:2] == [None, None]
        assert len(ended) <= 3, "more wait than may"
        assert all(isinstance(error, QueueFull) for error in ended[2:])


async def test_without_resume_a_stream_that_has_said_something_ends_and_the_rest_waits() -> None:
    async with bench(supervisor={"resume_streams": False}, scheduler={"max_num_seqs": 1}) as b:
        b.ranks.hold_after = 3
        b.ranks.open.clear()
        said, waits = (b.gateway.start(request(name, tokens=9)) for name in ("said", "waits"))
        b.ranks.open.set()  # the second step finds them both
        await b.until_held()
        b.ranks.kill()
        events, error = await read(said)
        assert isinstance(error, EngineDown)
        assert ids_of(events) == expected_ids((5, 6, 7), 3)
        events, error = await read(waits)
        assert error is None
        assert ids_of(events) == expected_ids((5, 6, 7), 9)
        assert b.value("requests_kept_total") == 1


@pytest.mark.parametrize(
    "error", [RankStartError("rank 0 ended while it started"), OSError(errno.EMFILE, "Too many open files")]
)
async def test_ranks_that_cannot_be_started_keep_everybody_waiting(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_SECONDS", 0.0)

    def prepare(ranks: FakeRanks, life: int) -> None:
        ranks.start_error = error if life in (1, 2) else None
        ranks.hold_after = 3 if life == 0 else None

    async with bench(prepare) as b:
        stream = b.gateway.start(request(tokens=9))
        await b.until_held()
        b.ranks.kill()
        events, end = await read(stream)
        assert end is None
        assert ids_of(events) == expected_ids((5, 6, 7), 9)
        assert len(b.groups) == 4


async def test_when_there_will_be_no_ranks_again_everything_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_SECONDS", 0.0)

    def prepare(ranks: FakeRanks, life: int) -> None:
        ranks.start_error = RankStartError("no memory") if life else None
        ranks.hold_after = 3

    async with bench(prepare, supervisor={"max_restarts_in_a_row": 2}) as b:
        stream = b.gateway.start(request(tokens=9))
        await b.until_held()
        b.ranks.kill()
        events, error = await read(stream)
        assert ids_of(events) == expected_ids((5, 6, 7), 3)
        assert isinstance(error, EngineDown)
        assert "could not be brought back" in str(error)
        await b.gateway.until_given_up()
        with pytest.raises(EngineDown):
            b.gateway.start(request("later"))
        assert not await b.gateway.abort(RequestId("r"))


async def test_a_request_that_kills_its_ranks_each_time_ends_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_SECONDS", 0.0)

    def prepare(ranks: FakeRanks, life: int) -> None:
        ranks.step_error = ExecutorDied("rank 0 died: signal SIGSEGV") if life < 3 else None

    async with bench(prepare) as b:
        assert isinstance((await read(b.gateway.start(request("kills"))))[1], EngineDown)
        events, error = await read(b.gateway.start(request("next")))
        assert error is None
        assert ids_of(events) == expected_ids((5, 6, 7), 4)
        assert len(b.groups) == 4


async def test_an_abort_while_there_are_no_ranks_is_obeyed_when_there_are() -> None:
    def prepare(ranks: FakeRanks, life: int) -> None:
        held_from_the_second_life_on(ranks, life)
        ranks.hold_after = 3 if life == 0 else None

    async with bench(prepare) as b:
        stream = b.gateway.start(request(tokens=9_000))
        await b.until_held()
        b.ranks.kill()
        await b.until_state(State.DOWN)
        aborting = b.gateway.abort(RequestId("r"))
        await b.until(lambda: len(b.groups) == 2)
        await b.until_told(1)
        b.ranks.ready.set()
        assert await aborting
        assert isinstance((await read(stream))[1], RequestAborted)


async def test_a_drain_waits_for_calls_whose_ranks_died() -> None:
    async with bench(lambda ranks, life: setattr(ranks, "hold_after", 3 if life == 0 else None)) as b:
        stream = b.gateway.start(request(tokens=9))
        await b.until_held()
        draining = asyncio.create_task(b.gateway.drain())
        await b.until_state(State.DRAINING)
        b.ranks.kill()
        events, error = await read(stream)
        assert error is None
        assert ids_of(events) == expected_ids((5, 6, 7), 9)
        await draining
        assert b.gateway.state is State.DRAINING


async def test_a_stop_while_there_are_no_ranks_ends_what_waits() -> None:
    async with bench(held_from_the_second_life_on) as b:
        b.ranks.hold_after = 3
        streams = [b.gateway.start(request(tokens=9_000))]
        await b.until_held()
        b.ranks.kill()
        await b.until(lambda: len(b.groups) == 2)
        await b.until_state(State.DOWN)
        streams.append(b.gateway.start(request("waits")))
        await b.gateway.stop()
        for stream in streams:
            assert isinstance((await read(stream))[1], Draining)


async def test_another_model_does_not_go_on_with_what_the_one_before_it_began() -> None:
    async with bench(held_from_the_second_life_on, rpc={"drain_seconds": 0.0}) as b:
        b.ranks.hold_after = 3
        stream = b.gateway.start(request(tokens=9_000))
        await b.until_held()
        reloading = asyncio.create_task(b.gateway.reload())
        await b.until_state(State.LOADING)
        b.ranks.open.set()
        await b.until(lambda: len(b.groups) == 2)
        b.ranks.ready.set()
        await reloading
        assert isinstance((await read(stream))[1], Loading)


async def test_a_defect_of_the_engine_keeps_nothing_of_it() -> None:
    def prepare(ranks: FakeRanks, life: int) -> None:
        ranks.step_error = ValueError("a defect") if life == 0 else None

    async with bench(prepare) as b:
        assert isinstance((await read(b.gateway.start(request())))[1], EngineDown)
        await b.until_life(1)
        assert b.value("requests_kept_total") == 0
