"""A client that reads nothing and answers nothing, and never said that it went."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil

from tests.chaos.case import RANKS, Case, Field, Report, goes_on, ranks_of, restarts, streams_under_way, under_load
from tests.support.server import ROOT, Server, serving, until

_STREAMS = 16
_NOT_WAITED_FOR = ("--stream-buffer-events", "16", "--slow-reader-seconds", "1")


def _client(server: Server) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.chaos.client", server.address, str(_STREAMS)]
    client = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert client.stdout is not None
    assert client.stdout.readline() == f"{_STREAMS} streams\n"
    return client


def _black_hole(field: Field, report: Report, rounds: int) -> None:
    expected, seconds = field.expected, []
    assert expected
    with (
        serving(field.model, *RANKS, *_NOT_WAITED_FOR, program=field.program) as server,
        under_load(field, report, server, others=rounds * _STREAMS) as (load, _),
    ):
        ranks, before = ranks_of(server), restarts(server)
        for _ in range(rounds):
            streams_under_way(load)
            client = _client(server)
            try:
                # Its machine takes what comes, and answers nothing: neither a window is opened nor a ping answered.
                client.send_signal(signal.SIGSTOP)
                began = time.monotonic()
                until(lambda client=client: not _is_connected(server, client))  # type: ignore[misc]
                seconds.append(time.monotonic() - began)
            finally:
                client.kill()
                client.wait()
            goes_on(load)
        report.expect(restarts(server) == before and ranks_of(server) == ranks, "ranks were started again")
    report.tell_seconds("seconds until the server let go of a connection", seconds)


def _is_connected(server: Server, client: subprocess.Popen[str]) -> bool:
    """Whether the server has its end of a connection of the client's."""
    theirs = {one.laddr for one in psutil.Process(client.pid).net_connections("tcp")}
    return any(one.raddr in theirs for one in psutil.Process(server.process.pid).net_connections("tcp"))


_FAULT = "a client stops with sixteen streams open, reads nothing and answers nothing"
CASES: dict[str, Case] = {"black-hole": Case(_FAULT, _black_hole, 1)}
