"""A folder that is needed is held, and whoever removes old ones asks first."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint import CheckpointError, claimed, hold
from checkpoint.disk.holding import Hold


def is_free(folder: Path) -> bool:
    with claimed(folder) as free:
        return free


def test_a_folder_is_held_until_all_who_hold_it_let_it_go(tmp_path: Path) -> None:
    one, other = hold(tmp_path), hold(tmp_path)
    assert one.locked
    assert not is_free(tmp_path)
    one.release()
    one.release()
    assert not is_free(tmp_path)
    del other
    assert is_free(tmp_path)


def test_a_hold_ends_with_its_process_and_is_not_inherited(tmp_path: Path) -> None:
    program = (
        f"import sys, pathlib, checkpoint; held = checkpoint.hold(pathlib.Path({str(tmp_path)!r})); print(); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert not is_free(tmp_path)
        process.kill()
        process.wait()
        assert is_free(tmp_path)


def test_what_is_being_removed_cannot_be_held(tmp_path: Path) -> None:
    with claimed(tmp_path), pytest.raises(CheckpointError, match="is being removed or written at this moment"):
        hold(tmp_path)
    hold(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        hold(tmp_path / "nowhere")
    assert is_free(tmp_path / "nowhere")


def test_what_becomes_of_a_held_folder_is_known(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    held = hold(folder)
    assert held.fate() == "in place"
    folder.rename(tmp_path / "elsewhere")
    assert held.fate() == "gone"
    folder.mkdir()
    assert held.fate() == "replaced"


def test_a_folder_that_is_replaced_before_its_lock_is_had_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hold, "fate", lambda self: "replaced")
    with pytest.raises(CheckpointError, match="was removed or replaced while it was being opened"):
        hold(tmp_path)
    assert is_free(tmp_path)


def test_where_there_are_no_locks_nothing_is_kept_and_nothing_stays_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    held = hold(tmp_path)
    assert not held.locked
    assert held.fate() == "in place"
    assert is_free(tmp_path)
