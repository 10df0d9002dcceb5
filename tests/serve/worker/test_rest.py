"""Work that has no hurry is done between steps, and also where steps never end."""

from __future__ import annotations

import threading

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


def test_a_step_that_never_ends_is_waited_for_no_longer_than_a_moment() -> None:
    rest = Rest()
    with rest.interrupted():
        rest.wait(0.01)
        assert not rest.rests, "it came back although the step goes on"


def test_a_step_that_fails_has_ended_too() -> None:
    rest = Rest()
    try:
        with rest.interrupted():
            raise RuntimeError
    except RuntimeError:
        assert rest.rests
