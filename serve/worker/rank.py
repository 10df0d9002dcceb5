"""One rank as its executor has it: its process, our ends of its sockets, and how it ended."""

from __future__ import annotations

import signal
import socket
from contextlib import ExitStack
from dataclasses import dataclass

from host import limits
from serve.worker.rank_output import RankOutput
from serve.worker.rank_process import RankProcess, RemoteProcess
from serve.worker.vitals import Vitals


@dataclass(slots=True)
class Rank:
    """A process that was started to be a rank, with our ends of its three sockets."""

    number: int
    process: RankProcess
    steps: socket.socket
    orders: socket.socket
    pulse: socket.socket
    started: float
    """Monotonic time."""
    vitals: Vitals
    output: RankOutput
    kills_before: int | None
    """How often the kernel had taken memory back in our group when its executor was made, where it tells."""

    def how_it_ended(self) -> str:
        """In words; that it closed its connection where its process lives."""
        code = self.process.poll()
        if code is None:
            return "it closed its connection"
        if isinstance(self.process, RemoteProcess) and self.process.how:
            return self.process.how
        if self.vitals.last_words is not None:
            return self.vitals.last_words.sentence
        if code >= 0:
            return f"exit code {code}"
        return self.killed_for_memory() or f"signal {signal.Signals(-code).name}"

    def killed_for_memory(self) -> str | None:
        """How the kernel took its memory back, in words, where it did."""
        if isinstance(self.process, RemoteProcess) or self.process.poll() != -signal.SIGKILL:
            return None
        return limits.killed_for_memory(self.kills_before)

    def comes_behind(self, code: int) -> int:
        """How far behind the first of all deaths this one, with this exit code, is likely to be.

        Who loses its device says so. When it has gone, or one that a signal ended, others fail to exchange anything with it,
        and end by themselves.
        """
        words = self.vitals.last_words
        if words is not None and words.kind != "exchange":
            return 0
        return 1 if code < 0 else 2


def connected(failed: ExitStack, always: ExitStack, kind: socket.SocketKind) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, the first of which ``failed`` closes and the second ``always``."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    failed.callback(ours.close)
    always.callback(theirs.close)
    return ours, theirs
