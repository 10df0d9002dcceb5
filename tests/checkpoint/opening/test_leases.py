"""Who wants to write to a file waits while a lease on it is held; where none can be had, nobody does."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import open_checkpoint
from checkpoint.opening.leases import Leases
from tests.checkpoint.folders import plain_folder
from tests.support.descriptors import descriptors
from tests.support.leases import needs_leases


def taken(leases: Leases, file: Path) -> bool:
    fd = os.open(file, os.O_RDONLY)
    try:
        return leases.take(fd)
    finally:
        os.close(fd)


@needs_leases
def test_a_writer_waits_until_the_lease_is_given_back(tmp_path: Path) -> None:
    file, leases = tmp_path / "file", Leases()
    file.write_bytes(b"before")
    assert taken(leases, file)
    assert taken(leases, file), "it is held already"
    assert not leases.is_awaited
    assert file.read_bytes() == b"before", "who reads waits for nobody"
    assert not leases.is_awaited

    writer = threading.Thread(target=file.write_bytes, args=(b"afterwards",))
    writer.start()
    while not leases.is_awaited:
        writer.join(0.001)
    assert file.read_bytes() == b"before"
    leases.give_back()
    writer.join(60)
    assert file.read_bytes() == b"afterwards"
    assert not leases.is_awaited


@needs_leases
def test_a_file_that_somebody_waits_for_is_not_taken_again(tmp_path: Path) -> None:
    file, leases = tmp_path / "file", Leases()
    file.touch()
    assert taken(leases, file)
    with pytest.raises(BlockingIOError):
        os.open(file, os.O_WRONLY | os.O_NONBLOCK)
    assert leases.is_awaited
    assert not taken(leases, file)
    leases.give_back()
    assert taken(leases, file)


def test_without_a_descriptor_to_spare_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(os, "dup", refuse)
    assert not taken(Leases(), file)


@needs_leases
def test_a_file_that_is_cut_by_its_name_waits_too(tmp_path: Path) -> None:
    file, leases = tmp_path / "file", Leases()
    file.write_bytes(b"before")
    assert taken(leases, file)
    cutter = threading.Thread(target=os.truncate, args=(file, 0))
    cutter.start()
    while not leases.is_awaited:
        cutter.join(0.001)
    assert file.read_bytes() == b"before"
    del leases
    cutter.join(60)
    assert file.read_bytes() == b""


@needs_leases
def test_a_file_that_somebody_writes_gets_none(tmp_path: Path) -> None:
    file, leases = tmp_path / "file", Leases()
    with file.open("wb"):
        assert not taken(leases, file)
    assert taken(leases, file)


@needs_leases
def test_others_may_have_leases_on_the_same_open_file_and_keep_theirs(tmp_path: Path) -> None:
    file, first, second = tmp_path / "file", Leases(), Leases()
    file.touch()
    assert taken(first, file)
    assert taken(second, file)
    first.give_back()
    with pytest.raises(BlockingIOError):
        os.open(file, os.O_WRONLY | os.O_NONBLOCK)
    assert second.is_awaited


@pytest.mark.parametrize("code", [errno.EACCES, errno.EINVAL, errno.ENOLCK])
def test_a_file_that_none_can_be_had_on_is_taken_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Another user's, or of a file system without leases."""
    file, leases, real = tmp_path / "file", Leases(), fcntl.fcntl

    def refuse(fd: int, command: int, *rest: Any) -> Any:
        if command == fcntl.F_SETLEASE:
            raise OSError(code, os.strerror(code))
        return real(fd, command, *rest)

    file.touch()
    before = descriptors()
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert taken(leases, file)
    assert not leases.is_awaited
    leases.give_back()
    assert descriptors() <= before


@needs_leases
def test_a_view_has_a_lease_on_its_file_or_there_is_none(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "ck", {"w": torch.randn(8, 8)})
    [file] = folder.glob("*.safetensors")
    leases = Leases()
    with open_checkpoint(folder) as checkpoint:
        with file.open("r+b"):
            assert checkpoint.view("w", dtype=torch.float32, leases=leases) is None, "it may change at any time"
            assert checkpoint.view("w", dtype=torch.float32) is not None
        assert checkpoint.view("w", dtype=torch.float32, leases=leases) is not None
    with pytest.raises(BlockingIOError):  # though the checkpoint is closed
        os.open(file, os.O_WRONLY | os.O_NONBLOCK)
    leases.give_back()
    os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
