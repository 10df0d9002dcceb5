"""Serving what the model's folder holds by now, and going on with what was served where that cannot be."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from checkpoint import claimed, hold
from serve.errors import ConfigError, Draining, EngineDown, Loading, RankStartError, ReloadRefused
from serve.runtime import flight, supervisor
from serve.runtime.edition import Edition
from serve.runtime.state import State
from tests.serve.runtime.ranks import FakeRanks, bench, expected_ids, ids_of, options, read, request

AGAIN = Edition(options(model={"path": "/models/newer", "name": "fake"}), None)


async def test_a_reload_lets_calls_end_and_brings_the_new_model_up() -> None:
    async with bench(reopen=lambda _: AGAIN) as b:
        first = b.gateway.edition
        b.ranks.open.clear()
        stream = b.gateway.start(request())
        reloading = asyncio.create_task(b.gateway.reload())
        await b.until_state(State.LOADING)
        with pytest.raises(Loading):
            b.gateway.start(request("late"))
        with pytest.raises(ReloadRefused, match="already"):
            await b.gateway.reload()
        assert len(b.groups) == 1
        b.ranks.open.set()
        events, error = await read(stream)
        assert error is None
        assert ids_of(events) == expected_ids((5, 6, 7), 4)
        await reloading
        assert b.states == [State.SERVING, State.LOADING, State.SERVING]
        assert [ranks.num_closes > 0 for ranks in b.groups] == [True, False]
        assert b.gateway.edition is AGAIN
        with pytest.raises(Loading, match="send it again"):
            b.gateway.start(request("made for the one before"), first)
        assert (await read(b.gateway.start(request("after"), AGAIN)))[1] is None
        assert b.value("engine_restarts_total") == 0, "nothing has failed"
        await b.gateway.reload()  # and again
        assert len(b.groups) == 3
        assert b.value("reloads_total", result="ranks") == 2


async def test_calls_that_do_not_end_in_time_are_cut() -> None:
    async with bench(rpc={"drain_seconds": 0.02}) as b:
        b.ranks.hold_after = 3
        stream = b.gateway.start(request(tokens=9_000))
        await anext(stream)
        reloading = asyncio.create_task(b.gateway.reload())
        assert isinstance((await read(stream))[1], Loading)
        b.ranks.open.set()
        await reloading
        assert (await read(b.gateway.start(request())))[1] is None


async def test_a_folder_that_cannot_be_read_changes_nothing() -> None:
    def reopen(edition: Edition) -> Edition:
        raise ConfigError("model.path: config.json is missing")

    async with bench(reopen=reopen) as b:
        stream = b.gateway.start(request(tokens=300))
        with pytest.raises(ReloadRefused, match=r"config\.json is missing; what was served before goes on"):
            await b.gateway.reload()
        assert ids_of((await read(stream))[0]) == expected_ids((5, 6, 7), 300)
        assert b.states == [State.SERVING]
        assert len(b.groups) == 1


@pytest.mark.parametrize("error", [ConfigError("w: has the wrong shape"), RankStartError("rank 1 ran out of memory")])
async def test_a_model_that_the_ranks_refuse_is_taken_back(error: ConfigError | RankStartError) -> None:
    def prepare(ranks: FakeRanks, life: int) -> None:
        ranks.start_error = error if life == 1 else None

    async with bench(prepare, reopen=lambda _: AGAIN) as b:
        first = b.gateway.edition
        with pytest.raises(ReloadRefused, match=f"{error}; what was served before is served again"):
            await b.gateway.reload()
        assert b.gateway.state is State.SERVING, "an operator who is told so finds it so"
        assert b.gateway.edition is first
        assert len(b.groups) == 3
        assert (await read(b.gateway.start(request(), first)))[1] is None
        assert b.value("reloads_total", result="taken_back") == 1
        assert b.value("reloads_refused_total") == 1, "it could not be served"
        assert b.value("engine_failures_total", reason="start") == 0, "what is taken back was no failure of what is served"


async def test_ranks_that_die_while_calls_end_do_not_keep_the_new_model_away() -> None:
    async with bench(reopen=lambda _: AGAIN) as b:
        b.ranks.open.clear()
        stream = b.gateway.start(request())
        reloading = asyncio.create_task(b.gateway.reload())
        await b.until_state(State.LOADING)
        b.ranks.kill()
        await read(stream)
        await reloading
        assert b.gateway.edition is AGAIN
        assert (await read(b.gateway.start(request(), AGAIN)))[1] is None


async def test_ranks_that_come_back_while_calls_end_take_no_new_ones() -> None:
    """Or there would always be calls, and the reload would cut them when its time is over."""

    def prepare(ranks: FakeRanks, life: int) -> None:
        if life == 1:
            ranks.ready.clear()
            ranks.open.clear()

    async with bench(prepare, reopen=lambda _: AGAIN) as b:
        b.ranks.open.clear()
        stream = b.gateway.start(request())
        reloading = asyncio.create_task(b.gateway.reload())
        await b.until_state(State.LOADING)
        b.ranks.kill()
        await b.until_state(State.DOWN)
        with pytest.raises(EngineDown):
            b.gateway.start(request("while there are no ranks"))
        await b.until(lambda: len(b.groups) == 2)
        b.groups[1].ready.set()
        await b.until_state(State.LOADING)
        with pytest.raises(Loading):
            b.gateway.start(request("while they end what is in flight"))
        b.groups[1].open.set()
        events, error = await read(stream)
        assert error is None
        assert ids_of(events) == expected_ids((5, 6, 7), 4)
        await reloading
        assert b.states == [State.SERVING, State.LOADING, State.DOWN, State.LOADING, State.SERVING]
        assert b.gateway.edition is AGAIN


async def test_a_new_model_whose_ranks_die_later_is_brought_back_as_itself() -> None:
    async with bench(reopen=lambda _: AGAIN) as b:
        await b.gateway.reload()
        b.ranks.kill()
        await b.until_life(2)
        assert b.gateway.edition is AGAIN


async def test_an_exchange_that_meets_a_defect_holds_its_folder_no_longer(tmp_path: Path) -> None:
    async with bench(reopen=lambda _: Edition(options(), None, (hold(tmp_path),))) as b:
        b.ranks.prepare_error = OSError("too many open files")
        with pytest.raises(OSError, match="too many open files"):
            await b.gateway.reload()
        with claimed(tmp_path) as is_free:
            assert is_free, "a run may remove what is not served"
        assert b.gateway.state is State.SERVING


async def test_a_served_folder_that_was_removed_is_named_when_its_ranks_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_SECONDS", 0.0)
    folder = tmp_path / "step-00000002"
    folder.mkdir()
    held = Edition(options(model={"path": str(folder), "name": "fake"}), None, (hold(folder),))
    async with bench(reopen=lambda _: held, supervisor={"max_restarts_in_a_row": 2}) as b:
        await b.gateway.reload()
        folder.rename(tmp_path / "aside")
        folder.mkdir()
        b.ranks.kill()
        await b.until_life(2)
        assert f"{folder} was replaced by another save" in caplog.text
        folder.rmdir()
        b.ranks.kill()
        error = await b.gateway.until_given_up()
        assert f"at last: {folder}, the folder that is served, was removed or renamed, or cannot be reached" in str(error)


async def test_a_server_that_is_told_to_go_while_it_loads_again_goes() -> None:
    def prepare(ranks: FakeRanks, life: int) -> None:
        if life == 1:
            ranks.ready.clear()

    async with bench(prepare) as b:
        reloading = asyncio.create_task(b.gateway.reload())
        await b.until(lambda: len(b.groups) == 2)
        await b.gateway.drain()
        assert b.gateway.state is State.DRAINING
        await b.gateway.stop()
        await asyncio.wait([reloading])
        assert b.ranks.num_closes > 0
        with pytest.raises(Draining):
            await b.gateway.reload()


async def test_a_drain_gives_calls_its_own_time_and_ends_a_reload_that_waits_for_them() -> None:
    async with bench() as b:
        b.ranks.open.clear()
        stream = b.gateway.start(request())
        reloading = asyncio.create_task(b.gateway.reload())
        await b.until_state(State.LOADING)
        draining = asyncio.create_task(b.gateway.drain())
        await asyncio.wait([reloading])
        assert isinstance(reloading.exception(), Draining)
        assert not draining.done()
        b.ranks.open.set()
        assert ids_of((await read(stream))[0]) == expected_ids((5, 6, 7), 4)
        await draining
        assert len(b.groups) == 1


async def test_a_reload_goes_on_when_its_caller_has_gone() -> None:
    async with bench(reopen=lambda _: AGAIN) as b:
        b.ranks.open.clear()
        stream = b.gateway.start(request())
        caller = asyncio.create_task(b.gateway.reload())
        await b.until_state(State.LOADING)
        caller.cancel()
        b.ranks.open.set()
        await read(stream)
        await b.until(lambda: b.gateway.edition is AGAIN)


async def test_a_model_before_that_cannot_come_back_either_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_SECONDS", 0.0)

    def prepare(ranks: FakeRanks, life: int) -> None:
        ranks.start_error = RankStartError("no memory") if life else None

    async with bench(prepare, supervisor={"max_restarts_in_a_row": 2}) as b:
        with pytest.raises(EngineDown, match="no memory, and what was served before cannot be brought back"):
            await b.gateway.reload()
        assert isinstance(await b.gateway.until_given_up(), RankStartError)
        assert b.gateway.state is State.DOWN


async def test_a_call_of_several_requests_is_waited_for_as_one() -> None:
    async with bench() as b:
        with b.gateway.call() as start:
            assert (await read(start(request("first"))))[1] is None
            draining = asyncio.create_task(b.gateway.drain())
            await b.until_state(State.DRAINING)
            with pytest.raises(Draining), b.gateway.call():
                pass
            assert ids_of((await read(start(request("second"))))[0]) == expected_ids((5, 6, 7), 4)
            assert not draining.done()
        await draining


async def test_a_call_that_is_late_may_start_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "FAREWELL_SECONDS", 0.0)
    async with bench(rpc={"drain_seconds": 0.0}) as b:
        with b.gateway.call() as start:
            await b.gateway.drain()
            with pytest.raises(Draining, match="did not end in time"):
                start(request("late"))
