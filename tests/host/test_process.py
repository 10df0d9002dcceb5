"""What a process of ours asks of the system for itself."""

from __future__ import annotations

import os
import threading

import pytest

from host.process import give_way


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
