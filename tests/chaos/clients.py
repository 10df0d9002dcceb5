"""A client that reads nothing, and either answers nothing or is out of reach, and never said that it went."""

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
_ENDS = 'tessera_request_finished_total{reason="%s"}'
_REASONS = ("slow_reader", "cancelled")
"""How its streams end that were not done before: cut because nobody reads them, or by the end of their connection."""
_MOST_SECONDS = 60
"""Until a connection is let go of: gRPC asks after 30 seconds and waits 10 for an answer, on a machine that has time for it."""


def _client(server: Server, how: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.chaos.client", server.address, str(_STREAMS), how]
    client = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert client.stdout is not None
    assert client.stdout.readline() == f"{_STREAMS} streams\n"
    return client


def _black_hole(field: Field, report: Report, rounds: int) -> None:
    expected = field.expected
    seconds: dict[str, list[float]] = {"stopped": [], "unreachable": []}
    assert expected
    with (
        serving(field.model, *RANKS, *_NOT_WAITED_FOR, program=field.program) as server,
        under_load(field, report, server, others=rounds * _STREAMS) as (load, _),
    ):
        ranks, before = ranks_of(server), restarts(server)
        for number in field.turns(report, rounds):
            how = ("unreachable", "stopped")[number % 2]
            streams_under_way(load)
            client = _client(server, how)
            began = time.monotonic()
            try:
                ends = _addresses(client)
                # A stopped client's machine takes what comes, but nothing reads it: no window is opened, no ping answered.
                client.send_signal(signal.SIGSTOP)
                until(lambda ends=ends: not _has_connection_to(server, ends))  # type: ignore[misc]
                seconds[how].append(time.monotonic() - began)
            finally:
                client.kill()
                client.wait()
            goes_on(load)
        now = server.metrics()
        report.figures["its streams ended"] = {reason: now.get(_ENDS % reason, 0) for reason in _REASONS}
        report.expect(restarts(server) == before and ranks_of(server) == ranks, "ranks were started again")
    for how, taken in seconds.items():
        report.tell_seconds(f"seconds until the server let go of a connection, {how}", taken)
        report.expect(not taken or max(taken) <= _MOST_SECONDS, f"a connection was held for more than {_MOST_SECONDS} s")


def _addresses(client: subprocess.Popen[str]) -> set[object]:
    """The client's ends of its connections."""
    return {one.laddr for one in psutil.Process(client.pid).net_connections("tcp") if one.raddr}


def _has_connection_to(server: Server, ends: set[object]) -> bool:
    return any(one.raddr in ends for one in psutil.Process(server.process.pid).net_connections("tcp"))


_FAULT = "a client with sixteen streams open stops, or cannot be reached any more"
CASES: dict[str, Case] = {"black-hole": Case(_FAULT, _black_hole, 2)}
