"""The look at /dev/shm that other tests take."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from tests.support import shared_memory
from tests.support.shared_memory import abandoned, in_shared_memory


def test_what_somebody_has_mapped_is_not_abandoned() -> None:
    before = in_shared_memory()
    segment = SharedMemory(create=True, size=64)
    try:
        assert segment.name.strip("/") in in_shared_memory() - before
        assert segment.name.strip("/") not in abandoned(before)
    finally:
        segment.close()
        segment.unlink()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of /dev/shm, where tests beside these would find what these leave."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    return tmp_path


def test_what_nobody_has_mapped_or_open_is_abandoned(folder: Path) -> None:
    before = in_shared_memory()
    for name in ("left", "mapped", "open"):
        (folder / name).write_bytes(b"x")
    with (folder / "open").open("rb"), (folder / "mapped").open("r+b") as file, mmap.mmap(file.fileno(), 1):
        file.close()
        assert abandoned(before) == {"left"}
    assert abandoned(before) == {"left", "mapped", "open"}


def test_a_process_that_closes_a_file_during_the_look_is_looked_at_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Callable[[str], str] = os.readlink

    def closed_since(place: str) -> str:
        if os.fspath(place) == f"/proc/{os.getpid()}/fd/{closed}":
            raise FileNotFoundError(place)
        return read(place)

    monkeypatch.setattr(os, "readlink", closed_since)
    with contextlib.ExitStack() as stack:
        closed = stack.enter_context((folder / "closed").open("w")).fileno()
        stack.enter_context((folder / "open").open("w"))
        assert abandoned(frozenset()) == {"closed"}
