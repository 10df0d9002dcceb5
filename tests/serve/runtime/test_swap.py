"""Weights that are newer and nothing else are taken by the ranks that serve: no call ends for it, and health stays."""

from __future__ import annotations

import asyncio

import pytest

from serve.errors import ConfigError, Loading, ReloadRefused
from serve.runtime.state import State
from tests.serve.runtime.ranks import FIRST_STEP, FakeRanks, bench, expected_ids, finish_of, ids_of, read, request


def alike(ranks: FakeRanks, life: int) -> None:
    ranks.alike = True


async def test_a_stream_goes_on_over_an_exchange_and_tells_what_made_its_tokens() -> None:
    async with bench(alike) as b:
        before = b.gateway.edition
        b.ranks.hold_after = 5
        stream = b.gateway.start(request(tokens=20))
        await b.until_held()
        reloading = asyncio.create_task(b.gateway.reload())
        await b.until_told(1)
        b.ranks.open.set()
        await reloading
        events, error = await read(stream)
        assert error is None
        ids, made = ids_of(events), finish_of(events).made_by
        assert [part.checkpoint_step for part in made] == [FIRST_STEP, FIRST_STEP + 1]
        cut = made[1].first_token
        assert ids[:cut] == expected_ids((5, 6, 7), cut)
        assert ids[cut:] == expected_ids((5, 6, 7, *ids[:cut]), 20 - cut, weights=1)
        assert b.states == [State.SERVING], "health never changed"
        assert len(b.groups) == 1
        assert b.gateway.edition is not before
        assert b.gateway.facts is not None
        assert b.gateway.facts.checkpoint_step == FIRST_STEP + 1
        await b.until(lambda: b.ranks.num_forgets == 1)
        assert b.value("weight_swaps_total") == 1
        late = b.gateway.start(request("late"), before)
        assert ids_of((await read(late))[0]) == expected_ids((5, 6, 7), 4, weights=1), "a call made before it is no stranger"


async def test_a_pinned_call_that_takes_too_long_is_the_only_one_that_ends() -> None:
    async with bench(alike, rpc={"drain_seconds": 0.02}) as b:
        b.ranks.hold_after = 5
        pinned = b.gateway.start(request("pinned", tokens=9_000, pin_weights=True))
        free = b.gateway.start(request("free", tokens=40))
        await b.until_held()
        reloading = asyncio.create_task(b.gateway.reload())
        await b.until_told(1)
        b.clock.ahead_seconds += 0.5
        b.ranks.open.set()
        await reloading
        assert isinstance((await read(pinned))[1], Loading)
        events, error = await read(free)
        assert error is None
        assert len(ids_of(events)) == 40


@pytest.mark.parametrize("when", ["prepared", "taken"])
async def test_weights_that_cannot_be_served_change_nothing_and_are_counted(when: str) -> None:
    def prepare(ranks: FakeRanks, life: int) -> None:
        ranks.alike = True
        ranks.prepare_error = ConfigError("model.safetensors: is cut short") if when == "prepared" else None
        ranks.refused = "the model's numbers are not finite" if when == "taken" else ""

    async with bench(prepare) as b:
        before = b.gateway.edition
        with pytest.raises(ReloadRefused, match="what was served before goes on"):
            await b.gateway.reload()
        assert b.gateway.edition is before
        assert ids_of((await read(b.gateway.start(request())))[0]) == expected_ids((5, 6, 7), 4)
        assert b.states == [State.SERVING]
        assert b.value("reloads_refused_total") == 1
        assert b.value("reloads_total", result="refused") == 1
        assert b.value("weight_swaps_total") == 0


async def test_ranks_that_start_again_load_what_was_taken_last() -> None:
    async with bench(alike) as b:
        await b.gateway.reload()
        taken = b.gateway.edition
        b.ranks.kill()
        await b.until_life(1)
        assert b.gateway.edition is taken
