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

PATIENCE_SECONDS = 120.0
"""For what comes within a moment on a machine that has nothing else to do."""


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
    return socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)


def scraped(served: MetricsEndpoint) -> bytes:
    with urllib.request.urlopen(served.url, timeout=PATIENCE_SECONDS) as response:
        content: bytes = response.read()
        return content


def is_closed(client: socket.socket) -> bool:
    """Whether the other end closes the connection without a word."""
    try:
        return client.recv(1) == b""
    except ConnectionError:  # what was sent came when it was closed already
        return True


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
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
            with contextlib.suppress(OSError):  # its time may be over before it has asked
                half.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
        assert all(map(is_closed, halves))
        # A connection's thread gives its place back after it has closed it.
        until(lambda: threading.active_count() <= before)


def test_a_scrape_that_has_asked_keeps_its_place() -> None:
    begun, go = threading.Semaphore(0), threading.Event()

    def slow(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        begun.release()
        assert go.wait(PATIENCE_SECONDS)
        return answers(environ, start_response)

    with listening(slow, max_seconds=PATIENCE_SECONDS) as served, contextlib.ExitStack() as stack:
        asked = [stack.enter_context(connected(served)) for _ in range(MAX_CONNECTIONS)]
        try:
            for one in asked:
                one.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                assert begun.acquire(timeout=PATIENCE_SECONDS)
            with connected(served) as late:
                assert late.recv(1) == b"", "closed unanswered: all have asked and are being answered"
        finally:
            go.set()
        for one in asked:
            assert one.recv(12) == b"HTTP/1.0 200"
