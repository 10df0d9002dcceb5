"""What a process of ours asks of the system for itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from host.process import be_killed_first, give_way


def niceness_after(steps: int) -> int:
    """Of a thread of its own, for no process can take it back."""
    found: list[int] = []

    def run() -> None:
        give_way(steps)
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_gives_way_from_where_it_stands_and_no_further_than_there_is() -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness_after(3) == min(19, mine + 3)
    assert niceness_after(40) == 19


def test_where_it_may_not_say_so_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    assert niceness_after(3) == os.getpriority(os.PRIO_PROCESS, 0)


def test_a_process_is_killed_for_memory_before_the_one_that_started_it() -> None:
    ours = int(Path("/proc/self/oom_score_adj").read_text())
    told = "from host.process import be_killed_first; be_killed_first(); print(open('/proc/self/oom_score_adj').read())"
    theirs = int(subprocess.run([sys.executable, "-c", told], check=True, capture_output=True, text=True).stdout)
    assert theirs == min(1000, ours + 300)


def test_no_process_is_made_likelier_to_be_killed_than_there_is_and_none_fails_for_it(tmp_path: Path) -> None:
    place = tmp_path / "oom_score_adj"
    place.write_text("900\n")
    be_killed_first(place)
    assert place.read_text() == "1000"
    be_killed_first(tmp_path / "none")
    assert not (tmp_path / "none").exists()
