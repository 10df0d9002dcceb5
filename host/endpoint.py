"""The HTTP endpoint of the metrics: a small server that nobody can fill.

Prometheus' own one gives every connection a thread for as long as it likes to stay, and a file descriptor, of which gRPC needs
the same few.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import WSGIApplication

MAX_CONNECTIONS: Final = 16
"""Connections at once. One more takes the place of the one that has been silent longest, or is closed unanswered where all
have asked and are being answered."""

MAX_SECONDS: Final = 10.0
"""From accepting a connection to the end of its answer; after that it is closed."""

_MAX_JOIN_SECONDS: Final = 1.0
"""For a thread that has lost its connection to end; no step of it takes that long."""


Wrap = Callable[[socket.socket], ssl.SSLSocket]
"""The server's end of TLS over a connection, before its handshake. Called in the connection's own thread."""


@dataclass(frozen=True, slots=True)
class MetricsEndpoint:
    """A running HTTP endpoint that serves ``/metrics``."""

    address: str
    """``host:port`` as bound."""
    scheme: str
    """``http``, or ``https`` over TLS."""
    _server: WSGIServer
    _thread: threading.Thread

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.address}/metrics"

    def close(self) -> None:
        """Stop listening and wait for the endpoint's thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def listen(
    app: WSGIApplication, host: str, port: int, *, max_seconds: float = MAX_SECONDS, wrap: Wrap | None = None
) -> MetricsEndpoint:
    """Serve ``app`` over HTTP on a thread of its own.

    Args:
        app: answers a request, such as ``prometheus_client.make_wsgi_app`` makes of a registry.
        host: a name or address without brackets.
        port: 0 picks a free one.
        max_seconds: how long one connection may last.
        wrap: makes TLS of each connection; plain without it.

    Raises:
        OSError: the address cannot be bound.
    """
    family, *_, (bare_host, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]

    class Server(_LimitedServer):
        address_family = family

    server: Any = make_server(str(bare_host), port, app, Server, _SilentHandler)
    server.max_seconds, server.wrap = max_seconds, wrap
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    shown = f"[{host}]" if ":" in host else host
    return MetricsEndpoint(f"{shown}:{server.server_port}", "http" if wrap is None else "https", server, thread)


class _SilentHandler(WSGIRequestHandler):
    """Answers one request; logs nothing."""

    def parse_request(self) -> bool:
        """Read the request; from then on the connection keeps its place until it is answered."""
        is_whole = super().parse_request()
        server: Any = self.server
        server.asked(self.request)
        return is_whole

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is no news."""


@dataclass(slots=True)
class _Connection:
    began_seconds: float
    has_asked: bool = False
    thread: threading.Thread | None = None


class _LimitedServer(ThreadingMixIn, WSGIServer):
    """A thread for each of a few connections, each for a few seconds."""

    daemon_threads = True
    request_queue_size = 1024  # connections that come at once wait for their turn, instead of for the next try of their kernel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_seconds = MAX_SECONDS
        self.wrap: Wrap | None = None
        self._lock = threading.Lock()
        self._open: dict[Any, _Connection] = {}  # by socket

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Take a connection in, if there is room or can be made."""
        with self._lock:
            is_full = len(self._open) >= MAX_CONNECTIONS
        if is_full and not self._end_most_silent():
            return False
        with self._lock:
            self._open[request] = _Connection(time.monotonic())
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection its thread."""
        words = (request, client_address)
        thread = threading.Thread(target=self.process_request_thread, args=words, name="scrape", daemon=True)
        self._open[request].thread = thread
        thread.start()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection, in its thread: a client that is slow to shake hands keeps nobody else waiting."""
        if self.wrap is not None:
            try:
                secured = self.wrap(request)
            except OSError:
                self.shutdown_request(request)
                return
            with self._lock:
                self._open[secured] = self._open.pop(request)
            request = secured
            try:
                secured.do_handshake()
            except OSError:  # no TLS, an unknown certificate, or out of time
                self.shutdown_request(secured)
                return
        super().process_request_thread(request, client_address)

    def asked(self, request: Any) -> None:
        """The connection's request was read."""
        with self._lock:
            self._open[request].has_asked = True

    def _end_most_silent(self) -> bool:
        """End the oldest connection that has not asked yet, its thread included; whether there was one, and it did end."""
        with self._lock:
            silent = [(one.began_seconds, one.thread, request) for request, one in self._open.items() if not one.has_asked]
        if not silent:
            return False
        _, thread, request = min(silent, key=lambda one: one[0])
        if thread is None:
            return False
        _hang_up(request)
        thread.join(_MAX_JOIN_SECONDS)
        return not thread.is_alive()

    def service_actions(self) -> None:
        """Called twice a second, and after each connection that comes: end those that have had their time."""
        oldest = time.monotonic() - self.max_seconds
        with self._lock:
            late = [request for request, one in self._open.items() if one.began_seconds < oldest]
        for request in late:
            _hang_up(request)

    def shutdown_request(self, request: Any) -> None:
        """The connection is over."""
        super().shutdown_request(request)
        with self._lock:
            self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves before its answer is its own affair."""


def _hang_up(request: Any) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)  # its thread meets the end of what it reads or writes
