"""Profiling of the ranks' steps, from the order to the last byte of the last trace."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

from serve.engine.executor import ExecutorDied, Profiled
from serve.errors import DeadlineExpired, EngineDown, ProfileRefused, RankStartError
from serve.runtime.seams import Profiling

_LOOK_SECONDS: Final = 0.05
"""Between two looks at how far the ranks are."""

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of one rank's trace."""

    rank: int
    steps: int
    """That the rank has recorded."""
    data: bytes


class Profiles:
    """Has the ranks record steps, one recording at a time. Belongs to the event loop."""

    def __init__(self, profiling: Callable[[], Profiling]) -> None:
        """
        Args:
            profiling: those of the ranks that serve; raises ``EngineDown`` or ``ExecutorDied`` where there are none.
        """
        self._profiling = profiling
        self._goes_on = False

    async def record(self, steps: int, ranks: Sequence[int], seconds: float) -> AsyncGenerator[Part, None]:
        """Record the next steps of these ranks, and yield their traces. Whoever stops reading ends the recording.

        Raises:
            ProfileRefused: another recording goes on, or the ranks cannot record.
            DeadlineExpired: no step came within ``seconds``.
            EngineDown: the ranks were lost meanwhile.
        """
        if self._goes_on:
            raise ProfileRefused("steps are being recorded already; ask when that has ended")
        self._goes_on = True
        try:
            profiling = _told(self._profiling)
            try:
                for recorded, rank in zip(await self._made(profiling, steps, ranks, seconds), ranks, strict=True):
                    offset = 0
                    while data := await asyncio.to_thread(_told, profiling.part, rank, offset):
                        yield Part(rank, recorded.num_steps, data)
                        offset += len(data)
            finally:
                # Also where the call was cancelled: what was begun is ended by itself before the next may begin.
                await asyncio.shield(asyncio.create_task(_forgotten(profiling, ranks)))
        finally:
            self._goes_on = False

    async def _made(self, profiling: Profiling, steps: int, ranks: Sequence[int], seconds: float) -> tuple[Profiled, ...]:
        """What each rank has once all have ended."""
        await asyncio.to_thread(_told, profiling.begin, ranks, steps, seconds)
        _log.info("recording %d steps, for %g s at most", steps, seconds)
        while True:
            found = await asyncio.to_thread(_told, profiling.told, ranks)
            if all(each.is_over for each in found):
                break
            await asyncio.sleep(_LOOK_SECONDS)
        failures = [each.failure for each in found if each.failure]
        if failures:
            raise ProfileRefused(failures[0])
        if not all(each.num_steps for each in found):
            raise DeadlineExpired(f"no step was computed within {seconds:g} s: there is nothing to record")
        return found


def _told(ask: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return ask(*args, **kwargs)
    except ExecutorDied as death:
        raise EngineDown("the ranks were lost while they recorded; try again in a moment") from death
    except RankStartError as error:
        raise ProfileRefused(str(error)) from error


async def _forgotten(profiling: Profiling, ranks: Sequence[int]) -> None:
    with contextlib.suppress(EngineDown, ProfileRefused):
        await asyncio.to_thread(_told, profiling.forget, ranks)
