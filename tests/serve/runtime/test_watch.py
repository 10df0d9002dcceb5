"""A run is followed: what is newer is served, and what is refused is tried again only when it has changed."""

from __future__ import annotations

from serve.errors import Loading, ReloadRefused
from serve.runtime.watch import Sight, Watch


class Folder:
    """What a watch sees, and what becomes of it."""

    def __init__(self) -> None:
        self.sight: Sight | None = Sight("step-1", "a", is_whole=True)
        self.served = "step-1"
        self.error: Exception | None = None
        self.tried: list[Sight | None] = []
        self.watch = Watch(look=self.look, reload=self.reload, served=lambda: self.served, every_seconds=1.0)

    async def look(self) -> Sight | None:
        return self.sight

    async def reload(self) -> None:
        self.tried.append(self.sight)
        if self.error is not None:
            raise self.error
        assert self.sight is not None
        self.served = self.sight.path


async def test_a_newer_checkpoint_is_served_once() -> None:
    folder = Folder()
    folder.sight = Sight("step-2", "b", is_whole=True)
    for _ in range(3):
        await folder.watch.look_once()
    assert (folder.served, len(folder.tried)) == ("step-2", 1)
    folder.sight = None
    await folder.watch.look_once()
    assert len(folder.tried) == 1, "a folder that cannot be read at this moment changes nothing"


async def test_a_refused_checkpoint_is_tried_again_when_its_files_change() -> None:
    folder = Folder()
    folder.sight, folder.error = Sight("step-2", "b", is_whole=True), ReloadRefused("it is cut short")
    for _ in range(3):
        await folder.watch.look_once()
    assert len(folder.tried) == 1
    folder.sight, folder.error = Sight("step-2", "c", is_whole=True), None
    await folder.watch.look_once()
    assert folder.served == "step-2"


async def test_a_server_that_has_no_time_is_asked_again() -> None:
    folder = Folder()
    folder.sight, folder.error = Sight("step-2", "b", is_whole=True), Loading("the model is being loaded")
    await folder.watch.look_once()
    folder.error = None
    await folder.watch.look_once()
    assert folder.served == "step-2"


async def test_a_folder_that_fills_slowly_is_taken_when_two_looks_found_the_same() -> None:
    folder = Folder()
    for mark in "xyz":
        folder.sight = Sight("checkpoint-2", mark, is_whole=False)
        await folder.watch.look_once()
    assert not folder.tried
    await folder.watch.look_once()
    assert folder.served == "checkpoint-2"
