"""Follows a run: has the server take each newer checkpoint that the folders of model and adapter come to hold."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from serve.errors import ReloadRefused, ServeError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sight:
    """What the folders of model and adapter hold at one moment."""

    paths: tuple[str, ...]
    """The folder of the newest checkpoint, and those of what it is made of beside."""
    mark: str
    """Stands for their files; two of the same paths with the same mark are the same save."""
    is_whole: bool
    """Whether all of them appeared at once with all their files. Else it is taken only when two looks found the same."""


class Watch:
    """Looks for a newer checkpoint again and again. Belongs to the event loop.

    One that is refused is told of once, and tried again when its files have changed.
    """

    def __init__(
        self,
        *,
        look: Callable[[], Awaitable[Sight | None]],
        reload: Callable[[], Awaitable[None]],
        served: Callable[[], tuple[str, ...]],
        failed: Callable[[], None],
        every_seconds: float,
    ) -> None:
        """Watch without beginning.

        Args:
            look: what is there; ``None`` where nothing that is a checkpoint is.
            reload: serves what is there, or raises why not.
            served: the folders that are served.
            failed: told of every look or reload that ended with an error which neither foresees.
            every_seconds: between two looks.
        """
        self._look = look
        self._reload = reload
        self._served = served
        self._failed = failed
        self._every_seconds = every_seconds
        self._settled: Sight | None = None
        """What needs nothing to be done: served, or refused."""
        self._before: Sight | None = None
        self._fault = ""
        """What ended the last look, if anything did: told of once, however often it comes again."""

    async def run(self) -> None:
        """Follow until cancelled, whatever a look meets: too few file descriptors now may be enough at the next one."""
        look: Callable[[], Awaitable[None]] = functools.partial(self._settle, None)
        while True:
            if await self._went_well(look):
                look = self.look_once
            await asyncio.sleep(self._every_seconds)

    async def _went_well(self, look: Callable[[], Awaitable[None]]) -> bool:
        try:
            await look()
        except Exception as error:
            self._failed()
            if repr(error) != self._fault:
                _log.exception("the run could not be followed; the next look is in %g s", self._every_seconds)
            self._fault = repr(error)
            return False
        self._fault = ""
        return True

    async def look_once(self) -> None:
        """One look, and a reload where it is due."""
        sight, before = await self._look(), self._before
        self._before = sight
        if sight is None or sight == self._settled:
            return
        if not sight.is_whole and sight != before:
            return
        try:
            await self._reload()
        except ReloadRefused as refused:
            _log.debug("not tried again until its files change: %s: %s", ", ".join(sight.paths), refused)
            self._settled = sight
        except ServeError as error:
            _log.info("a newer checkpoint waits for the server: %s", error)
        else:
            await self._settle(sight)

    async def _settle(self, sight: Sight | None) -> None:
        """What is served needs nothing more; ``sight`` led to it, and may have been followed by another meanwhile."""
        now = await self._look()
        self._settled = now if now is not None and now.paths == self._served() else sight
