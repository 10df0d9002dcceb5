"""A run is followed: what is newer is served, and what is refused is tried again only when it has changed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from serve.errors import Loading, ReloadRefused
from serve.runtime.watch import Sight, Watch
from tests.serve.runtime.ranks import PATIENCE_SECONDS


class Folder:
    """What a watch sees, and what becomes of it."""

    def __init__(self) -> None:
        self.sight: Sight | None = Sight(("step-1",), "a", is_whole=True)
        self.served: tuple[str, ...] = ("step-1",)
        self.error: Exception | None = None
        self.tried: list[Sight | None] = []
        self.unseen: list[Exception] = []
        """What the next looks end with."""
        self.num_failed = 0
        self.watch = Watch(
            look=self.look, reload=self.reload, served=lambda: self.served, failed=self.failed, every_seconds=1e-3
        )

    def failed(self) -> None:
        self.num_failed += 1

    async def look(self) -> Sight | None:
        if self.unseen:
            raise self.unseen.pop()
        return self.sight

    async def reload(self) -> None:
        self.tried.append(self.sight)
        if self.error is not None:
            raise self.error
        assert self.sight is not None
        self.served = self.sight.paths

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[Callable[[Callable[[], bool]], Awaitable[None]]]:
        """Within, the watch runs; yields what waits for a condition."""
        task = asyncio.create_task(self.watch.run())

        async def until(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not condition() and not task.done():  # noqa: ASYNC110
                    await asyncio.sleep(1e-3)
            assert not task.done(), "the watch has ended"

        yield until
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_newer_checkpoint_is_served_once() -> None:
    folder = Folder()
    folder.sight = Sight(("step-2",), "b", is_whole=True)
    for _ in range(3):
        await folder.watch.look_once()
    assert (folder.served, len(folder.tried)) == (("step-2",), 1)
    folder.sight = None
    await folder.watch.look_once()
    assert len(folder.tried) == 1, "a folder that cannot be read at this moment changes nothing"


async def test_a_refused_checkpoint_is_tried_again_when_its_files_change() -> None:
    folder = Folder()
    folder.sight, folder.error = Sight(("step-2",), "b", is_whole=True), ReloadRefused("it is cut short")
    for _ in range(3):
        await folder.watch.look_once()
    assert len(folder.tried) == 1
    folder.sight, folder.error = Sight(("step-2",), "c", is_whole=True), None
    await folder.watch.look_once()
    assert folder.served == ("step-2",)


async def test_a_server_that_has_no_time_is_asked_again() -> None:
    folder = Folder()
    folder.sight, folder.error = Sight(("step-2",), "b", is_whole=True), Loading("the model is being loaded")
    await folder.watch.look_once()
    folder.error = None
    await folder.watch.look_once()
    assert folder.served == ("step-2",)


async def test_a_folder_that_fills_slowly_is_taken_when_two_looks_found_the_same() -> None:
    folder = Folder()
    for mark in "xyz":
        folder.sight = Sight(("checkpoint-2",), mark, is_whole=False)
        await folder.watch.look_once()
    assert not folder.tried
    await folder.watch.look_once()
    assert folder.served == ("checkpoint-2",)


def too_many_files() -> OSError:
    return OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_a_watch_survives_what_it_does_not_know_tells_of_it_once_and_counts_it(caplog: pytest.LogCaptureFixture) -> None:
    folder = Folder()
    folder.unseen = [too_many_files() for _ in range(3)]  # before it began to follow
    async with folder.followed() as until:
        await until(lambda: folder.num_failed == 3)
        folder.sight, folder.error = Sight(("step-2",), "b", is_whole=True), too_many_files()
        await until(lambda: folder.num_failed > 4)  # while it loads a newer one
        folder.error = None
        await until(lambda: folder.served == ("step-2",))
        folder.unseen = [too_many_files()]
        await until(lambda: not folder.unseen)
        num_failed = folder.num_failed
        folder.sight = Sight(("step-3",), "c", is_whole=True)
        await until(lambda: folder.served == ("step-3",))
    assert folder.num_failed == num_failed
    told = [record for record in caplog.records if "could not be followed" in record.message]
    assert len(told) == 3, "once for each time it began to fail"
    assert all(record.exc_info for record in told)
