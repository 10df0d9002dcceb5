"""A server whose ranks note when each plan came and for how long they waited for it; ``waiting`` runs it.

``python -m benchmarks.noting serve NOTES OPTIONS`` is ``tessera-serve OPTIONS``, with a rank that is this file too.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from serve.worker import rank_loop, wire
from serve.worker.rank_process import NewRank, RankProcess

NOTE: Final = struct.Struct("dd")
"""When a plan came, by the system's monotonic clock, and for how many seconds it was waited for."""


class _Noting:
    """Starts ranks as this program, which notes into a file."""

    def __init__(self, notes: str) -> None:
        self._notes = notes

    def start(self, rank: NewRank, unless: Callable[[], None]) -> RankProcess:
        command = [sys.executable, "-m", "benchmarks.noting", "rank", self._notes, *rank.words(*rank.descriptors)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=rank.descriptors, env=rank.environment)


def be_rank(notes: str, words: list[str]) -> None:
    """A rank that notes how long it waits."""
    receive, main_thread = wire.receive, threading.main_thread()
    file = Path(notes).open("ab", buffering=0)  # noqa: SIM115 - the rank leaves without cleaning up

    def timed(connection: socket.socket) -> bytes:
        began = time.monotonic()
        message = receive(connection)
        if threading.current_thread() is main_thread:
            now = time.monotonic()
            file.write(NOTE.pack(now, now - began))
        return message

    wire.receive = timed
    rank_loop.main(words)


def be_server(notes: str, words: list[str]) -> int:
    """``tessera-serve`` whose ranks note."""
    from serve import cli
    from serve.worker import rank_process

    @contextlib.contextmanager
    def starter(_: object) -> Iterator[_Noting]:
        yield _Noting(notes)

    rank_process.rank_starter = starter  # type: ignore[assignment]  # of other ranks than it starts
    return cli.main(words)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["rank", notes, *words]:
            be_rank(notes, words)
        case ["serve", notes, *words]:
            sys.exit(be_server(notes, words))
