"""Refused calls go on one after the other: who waits, who does not, and that nobody else does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import pytest

from serve.rpc import pacing
from serve.rpc.pacing import Pace
from tests.serve.rpc.running import request
from tests.serve.rpc.test_tokens import bearer, code_of, guarded, make


@pytest.fixture
def for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that do not end within a test, so that none depends on how fast it runs."""
    monkeypatch.setattr(pacing, "_PAUSE_SECONDS", 3600.0)


async def waiting(pace: Pace, count: int) -> list[asyncio.Task[None]]:
    """So many that ask for a turn, each having asked."""
    tasks = [asyncio.create_task(pace.turn()) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


def done(tasks: list[asyncio.Task[None]]) -> list[int]:
    return [number for number, task in enumerate(tasks) if task.done()]


@pytest.mark.usefixtures("for_ever")
async def test_the_first_goes_on_at_once_and_the_next_wait() -> None:
    pace = Pace()
    tasks = await waiting(pace, 5)
    assert done(tasks) == [0]
    assert pace.num_waiting == 4
    for task in tasks:
        task.cancel()


async def test_all_go_on_in_their_order_one_at_a_time() -> None:
    pace = Pace()
    order: list[int] = []

    async def one(number: int) -> None:
        await pace.turn()
        order.append(number)

    await asyncio.gather(*(one(number) for number in range(40)))
    assert order == list(range(40))
    assert pace.num_waiting == 0
    await asyncio.wait_for(pace.turn(), 60)


@pytest.mark.usefixtures("for_ever")
async def test_when_as_many_wait_as_may_one_goes_on_for_each_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "MOST_WAITING", 3)
    pace = Pace()
    tasks = await waiting(pace, 4)
    tasks[1].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert pace.num_waiting == 2, "what gave up is not counted, and takes no turn"
    for expected in ([0, 1], [0, 1, 2], [0, 1, 2, 3]):
        tasks += await waiting(pace, 1)
        await asyncio.sleep(0)
        assert done(tasks) == expected
        assert pace.num_waiting == 3
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert pace.num_waiting == 0


@pytest.mark.usefixtures("for_ever")
async def test_a_call_with_a_token_does_not_wait_for_those_without(tmp_path: Path) -> None:
    file, audit = tmp_path / "tokens.json", tmp_path / "audit.log"
    token = make(file, "good", "generate")
    async with guarded(file, audit_log=str(audit)) as running:
        calls = [running.inference.Generate(request(), timeout=60) for _ in range(20)]
        refused = [asyncio.create_task(code_of(call)) for call in calls]
        first, _ = await asyncio.wait(refused, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in first] == [grpc.StatusCode.UNAUTHENTICATED]
        for _ in range(3):
            assert await code_of(running.inference.Generate(request(), **bearer(token))) is grpc.StatusCode.OK
        assert running.count("Generate", "UNAUTHENTICATED") == 1, "the others wait yet"
        for call in calls:
            call.cancel()
        await asyncio.wait(refused)
        await running.until(lambda: running.count("Generate", "CANCELLED") == 19)
    codes = [json.loads(line)["code"] for line in audit.read_text().splitlines()]
    assert sorted(codes) == ["OK"] * 3 + ["UNAUTHENTICATED"], "those that gave up are counted alone"


async def test_a_flood_of_refused_calls_is_answered_whole(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    make(file, "good", "generate")
    async with guarded(file) as running:
        codes = await asyncio.gather(*(code_of(running.inference.Generate(request(), timeout=60)) for _ in range(300)))
        assert set(codes) == {grpc.StatusCode.UNAUTHENTICATED}
        assert running.count("Generate", "UNAUTHENTICATED") == 300
