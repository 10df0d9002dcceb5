"""Steps are recorded one recording at a time, and what becomes of it harms nothing else."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest

from serve.errors import DeadlineExpired, EngineDown, Loading, ProfileRefused
from serve.runtime.profiles import Part
from tests.serve.runtime.ranks import PATIENCE_SECONDS, Bench, FakeRanks, bench, expected_ids, ids_of, read, request


async def recorded(b: Bench, steps: int = 5, ranks: tuple[int, ...] = (0, 1), seconds: float = 60.0) -> list[Part]:
    return [part async for part in b.gateway.profile(steps, ranks, seconds)]


async def test_the_traces_come_whole_one_rank_after_the_other_and_are_given_back() -> None:
    async with bench() as b:
        traces: dict[int, bytes] = defaultdict(bytes)
        parts = await recorded(b, steps=7, seconds=30.0)
        for part in parts:
            assert part.steps == 7
            traces[part.rank] += part.data
        assert traces == b.ranks.recorded.traces
        assert [part.rank for part in parts] == sorted(part.rank for part in parts)
        assert b.ranks.recorded.begun == [((0, 1), 7, 30.0)]
        assert b.ranks.recorded.num_forgets == 1
        assert {part.rank for part in await recorded(b, ranks=(1,))} == {1}


async def test_a_second_recording_is_refused_until_the_first_has_ended() -> None:
    async with bench() as b:
        b.ranks.recorded.over.clear()
        first = asyncio.create_task(recorded(b))
        await b.until(lambda: b.ranks.recorded.begun)
        with pytest.raises(ProfileRefused, match="already"):
            await asyncio.wait_for(recorded(b), PATIENCE_SECONDS)
        b.ranks.recorded.over.set()
        assert await first
        assert await recorded(b)


async def test_whoever_goes_away_ends_the_recording() -> None:
    async with bench() as b:
        b.ranks.recorded.over.clear()
        caller = asyncio.create_task(recorded(b))
        await b.until(lambda: b.ranks.recorded.begun)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert b.ranks.recorded.num_forgets == 1
        b.ranks.recorded.over.set()
        assert await recorded(b)


async def test_a_rank_that_dies_meanwhile_ends_the_recording_and_no_request() -> None:
    async with bench() as b:
        b.ranks.hold_after = 3
        stream = b.gateway.start(request(tokens=8))
        await b.until_held()
        b.ranks.recorded.over.clear()
        profile = asyncio.create_task(recorded(b))
        await b.until(lambda: b.ranks.recorded.begun)
        b.ranks.recorded.dead = True
        b.ranks.kill()
        with pytest.raises(EngineDown):
            await profile
        events, error = await read(stream)
        assert error is None
        assert ids_of(events) == expected_ids((5, 6, 7), 8)
        await b.until_life(1)
        assert await recorded(b)


async def test_what_the_ranks_could_not_record_is_told() -> None:
    async with bench() as b:
        b.ranks.recorded.failure = "the trace has 9 bytes, more than are sent: ask for fewer steps"
        with pytest.raises(ProfileRefused, match="fewer steps"):
            await recorded(b)
        b.ranks.recorded.failure, b.ranks.recorded.num_steps = "", 0
        with pytest.raises(DeadlineExpired, match="no step was computed within 2 s"):
            await recorded(b, seconds=2.0)
        assert b.ranks.recorded.num_forgets == 2


async def test_nothing_is_recorded_before_the_model_is_there_or_while_another_takes_its_place() -> None:
    def hold(ranks: FakeRanks, life: int) -> None:
        ranks.ready.clear()

    async with bench(hold, wait=False) as b:
        with pytest.raises(Loading):
            await recorded(b)
        b.ranks.ready.set()
        await b.gateway.until_serving()
        reloading = asyncio.create_task(b.gateway.reload())
        await b.until(lambda: b.gateway._reload.goes_on)
        with pytest.raises((ProfileRefused, Loading)):
            await recorded(b)
        await b.until(lambda: len(b.groups) == 2)
        b.ranks.ready.set()
        await reloading
