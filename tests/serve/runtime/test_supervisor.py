"""The life of the ranks: death is noticed, told, and mended."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import threading

import pytest

from serve.engine.executor import ExecutorDied, Loss
from serve.errors import ConfigError, EngineDown, RankStartError
from serve.runtime import supervisor
from serve.runtime.state import State
from tests.serve.runtime.ranks import LOSING, PATIENCE_SECONDS, Bench, FakeRanks, bench, expected_ids, ids_of, read, request


async def serves_exactly(b: Bench) -> None:
    events, error = await read(b.gateway.start(request("check", tokens=12)))
    assert error is None
    assert ids_of(events) == expected_ids((5, 6, 7), 12)


async def test_a_death_under_load_fails_what_is_in_flight_and_service_comes_back() -> None:
    async with bench(supervisor=LOSING) as b:
        b.ranks.open.clear()
        streams = [b.gateway.start(request(f"r{n}", tokens=9_000)) for n in range(20)]
        b.ranks.hold_after = 4  # the second step has them all
        b.ranks.open.set()
        for stream in streams:
            await anext(stream)
        b.ranks.kill()
        for events, error in await asyncio.gather(*(read(stream) for stream in streams)):
            assert isinstance(error, EngineDown)
            ids = ids_of(events)
            assert ids == expected_ids((5, 6, 7), len(ids)), "what came before the failure is right"
        await b.until_state(State.SERVING)
        await serves_exactly(b)
        assert b.states == [State.SERVING, State.DOWN, State.SERVING]
        assert [ranks.num_closes > 0 for ranks in b.groups] == [True, False]
        assert b.value("engine_restarts_total") == 1
        assert b.value("request_finished_total", reason="engine_down") == 20
        assert b.value("engine_up") == b.value("rank_up", rank="0") == b.value("rank_up", rank="1") == 1


async def test_a_death_is_noticed_while_nobody_asks_for_anything() -> None:
    async with bench(lambda ranks, life: ranks.ready.clear() if life else None, supervisor=LOSING) as b:
        b.ranks.kill()
        await b.until_state(State.DOWN)
        with pytest.raises(EngineDown):
            b.gateway.start(request())
        with pytest.raises(EngineDown):
            await b.gateway.flush_prefix_cache()
        await b.until(lambda: len(b.groups) == 2)
        assert b.groups[0].num_closes > 0
        assert b.value("engine_up") == b.value("rank_up", rank="0") == 0
        b.ranks.ready.set()
        await b.until_state(State.SERVING)
        await serves_exactly(b)


async def test_frozen_ranks_are_noticed_in_the_middle_of_a_step() -> None:
    async with bench() as b:
        b.ranks.open.clear()
        stream = b.gateway.start(request())
        await b.until(b.ranks.in_step.is_set)
        b.ranks.kill(Loss("rank 0 is frozen: no heartbeat for 6.1 s", "frozen"))
        assert ids_of((await read(stream))[0]) == expected_ids((5, 6, 7), 4)
        await b.until_state(State.SERVING)
        await serves_exactly(b)
        assert b.value("engine_failures_total", reason="frozen") == 1
        assert b.value("server_state", state="serving") == 1
        assert b.value("rank_memory_bytes", rank="1", where="host") == 1001, "of the new ranks"
        assert b.value("rank_memory_bytes", rank="1", where="device") == 2001


async def test_a_step_that_hangs_ends_the_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STACKS_SECONDS", 0.0)
    async with bench(supervisor={"step_timeout_seconds": 3.0, "step_margin_seconds": 2.0}) as b:
        b.ranks.open.clear()
        stream = b.gateway.start(request())
        await b.until(b.ranks.in_step.is_set)
        await b.pass_time(6.0)
        assert ids_of((await read(stream))[0]) == expected_ids((5, 6, 7), 4)
        await b.until_life(1)
        assert b.groups[0].num_dumps == 1, "the stacks of the hanging ranks were asked for"
        await serves_exactly(b)


@pytest.mark.parametrize(
    ("gpus", "called"), [((), "rank 1"), (("GPU-8f1c", "GPU-77aa"), r"rank 1 \(GPU-77aa\)")], ids=["cpu", "gpus"]
)
async def test_a_step_that_hangs_after_others_has_their_time_and_a_margin_and_its_rank_is_named(
    gpus: tuple[str, ...], called: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "STACKS_SECONDS", 0.0)

    def prepare(ranks: FakeRanks, life: int) -> None:
        ranks.behind, ranks.hold_after = 1, 5 if life == 0 else None
        ranks.facts = dataclasses.replace(ranks.facts, gpus=gpus)

    async with bench(prepare, supervisor={"step_margin_seconds": 3.0}) as b:
        stream = b.gateway.start(request(tokens=12))
        await b.until(lambda: b.ranks.num_steps == 5 and b.ranks.in_step.is_set())
        await b.pass_time(4.0)
        assert ids_of((await read(stream))[0]) == expected_ids((5, 6, 7), 12)
        await b.until_life(1)
        assert b.groups[0].num_dumps == 1
        await serves_exactly(b)
    assert re.search(rf"engine down: {called} hangs: step 5, 1 positions of 1 sequences, took longer than \d", caplog.text)


async def test_a_server_that_was_stopped_and_goes_on_keeps_its_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "WAKE_SECONDS", 0.0)

    def prepare(ranks: FakeRanks, life: int) -> None:
        ranks.hold_after = 5

    async with bench(prepare) as b:
        stream = b.gateway.start(request(tokens=12))
        await b.until_held()
        looks = b.ranks.num_looks
        b.clock.ahead_seconds += 1000.0
        await b.until(lambda: b.ranks.num_looks > looks + 3)
        b.ranks.open.set()
        events, error = await read(stream)
        assert error is None
        assert ids_of(events) == expected_ids((5, 6, 7), 12)
        assert len(b.groups) == 1
    assert re.search(r"the server stood still for \d+\.\d s", caplog.text)


async def test_a_stop_while_a_step_is_under_way_that_nobody_waits_for_yet_makes_no_step_seem_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "WAKE_SECONDS", 0.0)
    waits, goes_on = threading.Event(), threading.Event()

    def wait(seconds: float, bell: int | None = None) -> bool:
        if seconds:
            waits.set()
            goes_on.wait(PATIENCE_SECONDS)
        return True

    def prepare(ranks: FakeRanks, life: int) -> None:
        ranks.step_seconds = 0.02
        ranks.wait = wait  # type: ignore[method-assign]

    async with bench(prepare) as b:
        stream = b.gateway.start(request(tokens=12))
        await b.until(waits.is_set)
        assert b.gateway._bridge.step_started_seconds is None
        looks = b.ranks.num_looks
        b.clock.ahead_seconds += 1000.0
        await b.until(lambda: b.ranks.num_looks > looks + 3)
        goes_on.set()
        assert ids_of((await read(stream))[0]) == expected_ids((5, 6, 7), 12)
        life = b.gateway._supervisor._life
        assert life is not None
        assert life.steps.limit_seconds() < 200.0


async def test_ranks_that_hang_while_they_load_are_noticed_and_show_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STACKS_SECONDS", 0.0)

    def prepare(ranks: FakeRanks, life: int) -> None:
        ranks.ready.clear()
        ranks.kill("rank 1 is frozen while the model is loaded")

    async with bench(prepare, wait=False) as b:
        with pytest.raises(RankStartError, match="rank 1 is frozen while the model is loaded"):
            await b.gateway.until_serving()
        assert (b.ranks.num_dumps, b.ranks.num_closes > 0) == (1, True)


async def test_a_defect_in_the_engine_is_treated_as_its_death(caplog: pytest.LogCaptureFixture) -> None:
    def prepare(ranks: FakeRanks, life: int) -> None:
        ranks.step_error = ValueError("a defect") if life == 0 else None

    async with bench(prepare) as b:
        assert isinstance((await read(b.gateway.start(request())))[1], EngineDown)
        await b.until_state(State.SERVING)
        await serves_exactly(b)
    assert "the engine broke" in caplog.text
    assert "ValueError: a defect" in caplog.text


async def test_ranks_that_never_complete_a_step_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_SECONDS", 0.0)

    def prepare(ranks: FakeRanks, life: int) -> None:
        ranks.step_error = ExecutorDied("rank 0 died: exit code 1")

    async with bench(prepare, supervisor={**LOSING, "max_restarts_in_a_row": 2}) as b:
        for _ in range(3):
            await b.until_state(State.SERVING)
            assert isinstance((await read(b.gateway.start(request())))[1], EngineDown)
        error = await b.gateway.until_given_up()
        assert isinstance(error, RankStartError)
        assert error.exit_code == 1
        assert (
            "after 2 restarts without a completed step, the limit of supervisor.max_restarts_in_a_row; at last: rank 0 died"
            in str(error)
        )
        assert b.gateway.state is State.DOWN
        assert len(b.groups) == 3


async def test_a_successful_step_forgives_earlier_deaths() -> None:
    async with bench(supervisor={"max_restarts_in_a_row": 1}) as b:
        for life in range(4):
            await b.until_life(life)
            await serves_exactly(b)
            b.ranks.kill()
        await b.until_life(4)
        assert b.value("engine_restarts_total") == 4
        # Totals are of all lives together.
        assert b.value("generation_tokens_total") == 4 * 12
        assert b.value("prompt_tokens_total") == 4 * 3


async def test_a_restart_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_SECONDS", 0.0)

    def prepare(ranks: FakeRanks, life: int) -> None:
        ranks.start_error = RankStartError("rank 0 ended while it started") if life in (1, 2) else None

    async with bench(prepare) as b:
        b.ranks.kill()
        await b.until(lambda: len(b.groups) == 4)
        await b.until_life(1)
        await serves_exactly(b)
        assert all(ranks.num_closes > 0 for ranks in b.groups[:3])


@pytest.mark.parametrize("error", [ConfigError("config.json: is missing"), RankStartError("rank 1 ran out of memory")])
async def test_a_first_start_that_fails_is_final(error: ConfigError | RankStartError) -> None:
    def prepare(ranks: FakeRanks, life: int) -> None:
        ranks.start_error = error

    async with bench(prepare, wait=False) as b:
        with pytest.raises(type(error), match=str(error)):
            await b.gateway.until_serving()
        assert len(b.groups) == 1
        assert b.ranks.num_closes > 0


async def test_ranks_that_take_too_long_to_start_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "START_GRACE_SECONDS", 0.0)
    async with bench(lambda ranks, _: ranks.ready.clear(), wait=False, supervisor={"start_timeout_seconds": 0.05}) as b:
        with pytest.raises(RankStartError, match=r"not ready within 0.05 s"):
            await b.gateway.until_serving()


async def test_stopping_while_the_model_loads_ends_the_ranks() -> None:
    async with bench(lambda ranks, _: ranks.ready.clear(), wait=False) as b:
        await b.until(lambda: b.groups and b.ranks.started_on)
        await b.gateway.stop()
        assert b.ranks.num_closes > 0
        assert b.states == [State.STOPPED]
        assert len(b.groups) == 1


async def test_stopping_does_not_wait_for_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LEAVE_SECONDS", 0.02)
    async with bench() as b:
        b.ranks.open.clear()
        b.gateway.start(request())
        await b.until(b.ranks.in_step.is_set)
        await b.gateway.stop()
        assert b.ranks.num_closes > 0
        assert len(b.groups) == 1


async def test_the_thread_that_starts_the_ranks_lives_as_long_as_they_do() -> None:
    async with bench() as b:
        thread = b.ranks.started_on
        b.ranks.kill()
        await b.until_life(1)
        assert thread is not None
        assert thread.is_alive()
        assert b.ranks.started_on is thread


def test_the_first_restart_comes_at_once_and_later_ones_later() -> None:
    waits = [supervisor._backoff_seconds(n) for n in (1, 2, 3, 4, 20)]
    assert waits == [0.0, 0.5, 1.0, 2.0, 30.0]
