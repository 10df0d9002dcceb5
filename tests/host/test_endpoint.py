"""The endpoint of the metrics: who does not ask, or does not read, is closed and keeps nobody out."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from host.endpoint import MAX_CONNECTIONS, MetricsEndpoint, listen


def answers(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"up 1\n"]


@contextlib.contextmanager
def listening(app: Any = answers, **limits: float) -> Iterator[MetricsEndpoint]:
    served = listen(app, "127.0.0.1", 0, **limits)
    try:
        yield served
    finally:
        served.close()


def connected(served: MetricsEndpoint) -> socket.socket:
    host, _, port = served.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def scraped(served: MetricsEndpoint) -> bytes:
    with urllib.request.urlopen(served.url, timeout=30) as response:
        content: bytes = response.read()
        return content


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_hundreds_of_half_open_connections_keep_few_threads_and_do_not_stop_a_scrape() -> None:
    before = threading.active_count()
    with listening() as served, contextlib.ExitStack() as stack:
        for _ in range(600):
            half = stack.enter_context(connected(served))
            with contextlib.suppress(OSError):  # the oldest are ended meanwhile
                half.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
            assert threading.active_count() <= before + 1 + MAX_CONNECTIONS
        assert scraped(served) == b"up 1\n", "while all are open, and none has had its time"


def test_what_half_asks_is_closed_when_its_time_is_over() -> None:
    with listening(max_seconds=0.2) as served, contextlib.ExitStack() as stack:
        before = threading.active_count()
        halves = [stack.enter_context(connected(served)) for _ in range(MAX_CONNECTIONS)]
        for half in halves:
            half.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
        assert [half.recv(1) for half in halves] == [b""] * MAX_CONNECTIONS
        # A connection's thread gives its place back after it has closed it.
        until(lambda: threading.active_count() <= before)


def test_a_scrape_that_has_asked_keeps_its_place() -> None:
    begun, go = threading.Semaphore(0), threading.Event()

    def slow(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        begun.release()
        assert go.wait(30)
        return answers(environ, start_response)

    with listening(slow) as served, contextlib.ExitStack() as stack:
        asked = [stack.enter_context(connected(served)) for _ in range(MAX_CONNECTIONS)]
        try:
            for one in asked:
                one.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                assert begun.acquire(timeout=30)
            with connected(served) as late:
                assert late.recv(1) == b"", "closed unanswered: all have asked and are being answered"
        finally:
            go.set()
        for one in asked:
            assert one.recv(12) == b"HTTP/1.0 200"
