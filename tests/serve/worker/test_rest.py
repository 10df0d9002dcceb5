"""Work that has no hurry is done between steps, and also where steps never end."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from serve.worker import rest as module
from serve.worker.rest import Rest


def test_who_waits_goes_on_when_the_step_has_ended() -> None:
    rest, done = Rest(), threading.Event()
    rest.wait(60.0)

    def wait_for_long() -> None:
        for _ in range(3):
            rest.wait(60.0)
        done.set()

    with rest.interrupted():
        waiting = threading.Thread(target=wait_for_long)
        waiting.start()
        assert not rest.rests
    assert rest.rests
    waiting.join(60)
    assert done.is_set()


def test_a_step_that_never_ends_is_waited_for_no_longer_than_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rest = [0.0], Rest()

    def pass_by(seconds: float) -> bool:
        clock[0] += seconds
        return False

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=pass_by))
    with rest.interrupted():
        monkeypatch.setattr(rest._rests, "wait", pass_by)
        rest.wait(0.03)
    assert clock[0] == pytest.approx(0.03)


def test_steps_with_moments_between_them_keep_nobody_longer_than_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept, rest = [0.0], list[float](), Rest()

    def sleep(seconds: float) -> None:  # the next step begins meanwhile
        clock[0] += seconds
        slept.append(seconds)
        rest._rests.clear()

    def end_of_step(timeout: float) -> bool:
        rest._rests.set()
        return True

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(rest._rests, "wait", end_of_step)
    rest.wait(0.012)
    assert slept == pytest.approx([0.005, 0.005, 0.002])


def test_a_step_that_fails_has_ended_too() -> None:
    rest = Rest()
    try:
        with rest.interrupted():
            raise RuntimeError
    except RuntimeError:
        assert rest.rests
