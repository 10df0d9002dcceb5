"""Signs of life of one rank, seen from outside: its heartbeats, and what the kernel says of its work."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import psutil

PULSE: Final = struct.Struct("!?QQ")
"""A heartbeat: whether the rank waits for others, its count, and its device memory; see ``serve.worker.progress``."""
_LOOK_SECONDS: Final = 0.5
"""Between two looks at what a rank that loads has done."""
_MESSAGE_BYTES: Final = 2048
_MARK: Final = b"!"
"""What last words begin with, and no heartbeat."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class LastWords:
    """Why a rank ends itself, sent where its heartbeats are: a return code does not tell."""

    kind: Literal["memory", "device", "exchange"]
    """What failed: the device's memory was too small, the device broke, or ranks could not exchange what they must."""
    sentence: str

    def encode(self) -> bytes:
        """The message that says so, cut to what one may have."""
        return (_MARK + f"{self.kind} {self.sentence}".encode())[:_MESSAGE_BYTES]

    @staticmethod
    def decode(message: bytes) -> LastWords | None:
        """What a message says; ``None`` for a heartbeat, or for what no rank sends."""
        if not message.startswith(_MARK):
            return None
        word, _, sentence = message.removeprefix(_MARK).decode(errors="replace").partition(" ")
        kinds: tuple[Literal["memory", "device", "exchange"], ...] = ("memory", "device", "exchange")
        return next((LastWords(kind, sentence) for kind in kinds if kind == word), None)


class Vitals:
    """What is known of one rank. Not thread-safe.

    A heartbeat comes from a thread of its own: it proves that the process runs, not that its work goes on. While the model is
    loaded that is seen from the processor time of the thread that loads, the bytes that the process reads, and the processor
    time of programs it has started (a compiler).
    """

    def __init__(self, number: int, process_id: int, pulse: socket.socket, now: float) -> None:
        self.number = number
        self.heard = now
        """When the last heartbeat came."""
        self.worked = now
        """When the rank was last seen to have done anything, while it loads."""
        self.count = 0
        self.waiting = False
        self.device_bytes = 0
        self.last_words: LastWords | None = None
        """What it said of its end, if it ended itself and could."""
        self._process_id = process_id
        self._pulse = pulse
        self._work = Work(process_id, now)

    def listen(self, now: float) -> None:
        """Take in the heartbeats that have come."""
        with contextlib.suppress(BlockingIOError, OSError):
            while message := self._pulse.recv(_MESSAGE_BYTES):
                self.heard = now
                if (words := LastWords.decode(message)) is not None:
                    self.last_words = words
                else:
                    self.waiting, self.count, self.device_bytes = PULSE.unpack(message)

    def resident_bytes(self) -> int:
        """What the process has in memory; 0 where the system does not tell, or it is gone."""
        try:
            return int(Path(f"/proc/{self._process_id}/statm").read_text().split()[1]) * _PAGE_BYTES
        except (OSError, ValueError, IndexError):
            return 0

    def look(self, now: float) -> None:
        """See whether the rank has done anything since the last look; costs nothing when that is a moment ago."""
        self._work.look(now)
        self.worked = self._work.last


class Work:
    """When a process, or a program that it has started, was last seen to have done anything. Not thread-safe."""

    def __init__(self, process_id: int, now: float) -> None:
        self.last = now
        self._process_id = process_id
        self._looked = now
        self._seen: tuple[int, ...] = ()
        self._helpers_seconds = 0.0

    def look(self, now: float) -> None:
        """See whether it has done anything since the last look; costs nothing when that is a moment ago."""
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        seen = _work_of(self._process_id)
        if seen and seen == self._seen:  # where the system does not tell, nothing is known against the process
            helpers_seconds = _helpers_seconds(self._process_id)
            if helpers_seconds == self._helpers_seconds:
                return
            self._helpers_seconds = helpers_seconds
        self._seen, self.last = seen, now


def stalled(ranks: Sequence[Vitals], now: float, limit_seconds: float) -> str | None:
    """A sentence about the rank that has shown no sign of work for longest while the model is loaded, if that is too long.

    One that waits for the others is excused while any of them works, as long as its heart beats.
    """
    youngest = min((now - rank.worked for rank in ranks), default=0.0)

    def silence(rank: Vitals) -> float:
        return max(youngest, now - rank.heard) if rank.waiting else now - rank.worked

    worst = max(ranks, key=lambda rank: (silence(rank), not rank.waiting), default=None)
    if worst is None or silence(worst) <= limit_seconds:
        return None
    beats = now - worst.heard < limit_seconds / 2
    what = f"rank {worst.number} {'hangs' if beats else 'is frozen'} while the model is loaded"
    return f"{what}: for {silence(worst):.1f} s it has neither read nor computed anything"


def furthest_behind(ranks: Sequence[Vitals]) -> int | None:
    """The rank that the others wait for; ``None`` where none is behind the others."""
    if len(ranks) == 1:
        return ranks[0].number
    counts = [rank.count for rank in ranks]
    lowest = min(counts, default=0)
    return ranks[counts.index(lowest)].number if counts.count(lowest) == 1 else None


def _work_of(process_id: int) -> tuple[int, ...]:
    """Page faults and processor time of the main thread, bytes read by the process; empty where the system does not tell."""
    folder = Path(f"/proc/{process_id}")
    try:
        # Behind the name in brackets, which may hold anything, comes field 3; 12 is major faults, 14 and 15 processor time.
        words = (folder / f"task/{process_id}/stat").read_text().rpartition(")")[2].split()
        work = tuple(int(words[field - 3]) for field in (12, 14, 15))
    except (OSError, ValueError, IndexError):
        return ()
    with contextlib.suppress(OSError, ValueError, IndexError):
        work += (int((folder / "io").read_text().split()[1]),)
    return work


def _helpers_seconds(process_id: int) -> float:
    """Processor time of the programs that a process has started and that still run."""
    seconds = 0.0
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process_id).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                times = child.cpu_times()
                seconds += times.user + times.system
    return seconds
