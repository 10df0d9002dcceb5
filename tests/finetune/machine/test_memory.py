"""What processes hold, read from outside."""

from __future__ import annotations

import subprocess
import sys

import pytest

from finetune.machine.memory import MemoryWatch, pages_of


def test_a_watch_sees_a_peak_that_is_gone_again() -> None:
    program = (
        "import sys; x = bytearray(200 << 20); x[::4096] = b'1' * len(x[::4096]); del x; print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with MemoryWatch([child.pid]) as watch:
            pass
        pages = pages_of(child.pid)
        child.communicate(b"")
    assert pages is not None
    assert pages.own < 100 << 20
    assert 200 << 20 <= watch.peaks[0] < 260 << 20
    assert watch.peak_bytes >= watch.peaks[0]
    assert pages_of(child.pid) is None


def test_what_ends_before_the_watch_has_its_turn_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryWatch, "_run", lambda self: None)
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child,
        MemoryWatch([child.pid]) as watch,
    ):
        child.communicate(b"\n")
    assert len(watch.peaks) == 1
