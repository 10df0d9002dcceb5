"""What a fault leaves behind is seen."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.chaos.leftovers import Held, Surroundings, descriptors
from tests.support import shared_memory


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of ``/dev/shm``, where tests beside this one would see what it leaves, and it what they leave."""
    folder = tmp_path_factory.mktemp("shm")
    monkeypatch.setattr(shared_memory, "FOLDER", folder)
    return folder


@pytest.fixture
def surroundings(tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> Surroundings:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Surroundings()


def test_where_nothing_came_nothing_is_left(surroundings: Surroundings) -> None:
    assert surroundings.left(None) == []


def test_a_process_that_goes_on_is_left_over(surroundings: Surroundings) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        left = surroundings.left(None, within_seconds=0.1)
        process.communicate(b"\n")
    assert [f"({process.pid})" in found for found in left] == [True]
    assert surroundings.left(None) == []


def test_a_temporary_file_is_left_over(surroundings: Surroundings, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "inner").touch()
    assert surroundings.left(None) == ["file made", "file made/inner"]


def test_a_name_in_shared_memory_is_left_over_unless_a_process_uses_it(surroundings: Surroundings, shared: Path) -> None:
    (shared / "left").touch()
    with (shared / "used").open("w"):
        assert surroundings.left(None) == [str(shared / "left")]


def test_descriptors_are_counted_by_kind() -> None:
    before = descriptors(os.getpid())
    read, write = os.pipe()
    memory = os.memfd_create("held")
    more = descriptors(os.getpid()) - before
    for descriptor in (read, write, memory):
        os.close(descriptor)
    assert more == {"descriptor of pipe": 2, "descriptor of /memfd:held (deleted)": 1}


def test_a_child_that_died_and_a_pipe_that_stays_open_are_more_than_before() -> None:
    program = "import os\nprint(flush=True)\ninput()\nos.pipe()\nif not os.fork(): os._exit(0)\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        held = Held(process.pid)
        assert held.more(within_seconds=0) == []
        process.stdin.write(b"\n")
        process.stdout.readline()
        more = held.more(within_seconds=0)
        process.stdin.write(b"\n")
    assert more[0] == "2 more descriptor of pipe"
    assert more[1].startswith("1 more process ")


def test_the_checkpoint_that_is_held_may_be_another_one_but_not_one_more(tmp_path: Path) -> None:
    def held(*steps: int) -> int:
        opened = []
        for step in steps:
            (tmp_path / f"step-{step}").mkdir(exist_ok=True)
            opened.append(os.open(tmp_path / f"step-{step}", os.O_RDONLY))
        found = descriptors(os.getpid())[f"descriptor of {tmp_path}/step-*"]
        for descriptor in opened:
            os.close(descriptor)
        return found

    assert (held(1), held(2), held(2, 3)) == (1, 1, 2)
