"""Memory that was freed goes back to the system, when there is enough of it and not otherwise; what stays is looked at once."""

from __future__ import annotations

import asyncio
import gc

import pytest

from serve.runtime.memory import keep_trimmed, set_aside

MIB = 1 << 20


async def looked(sizes: list[int], freed: int) -> list[int]:
    """At which look the heap was trimmed, given what is in memory at each, of which a trim gives so much back."""
    given = iter(sizes)
    now, at, trims = 0, -1, list[int]()
    over = asyncio.Event()

    def resident() -> int:
        nonlocal now, at
        if trims and trims[-1] == at:  # asked again after it was trimmed
            trims.append(-1)
            return now - freed
        at += 1
        now = next(given, -1)
        if now < 0:
            over.set()
        return now

    task = asyncio.create_task(keep_trimmed(resident, lambda: trims.append(at), every_seconds=0.0))
    await asyncio.wait_for(over.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return [look for look in trims if look >= 0]


async def test_the_heap_is_trimmed_once_it_has_grown() -> None:
    assert await looked([40 * MIB, 41 * MIB, 47 * MIB, 90 * MIB, 42 * MIB], freed=45 * MIB) == [3]


async def test_what_could_not_be_given_back_while_it_was_in_use_is_later() -> None:
    assert await looked([40 * MIB, 90 * MIB, 90 * MIB, 90 * MIB], freed=0) == [1, 2, 3]


async def test_the_least_counts_that_there_ever_was() -> None:
    assert await looked([60 * MIB, 50 * MIB, 59 * MIB], freed=0) == [2]


def test_what_was_there_is_looked_at_no_more_and_what_comes_is() -> None:
    class Ring:
        pass

    try:
        before = Ring()
        set_aside()
        after = Ring()
        tracked = gc.get_objects()
        assert any(each is after for each in tracked)
        assert not any(each is before for each in tracked)
    finally:
        gc.unfreeze()
