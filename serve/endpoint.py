"""The HTTP endpoint of the metrics: a small server that nobody can fill.

Prometheus' own one gives every connection a thread for as long as it likes to stay, and a file descriptor, of which gRPC needs
the same few.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

MAX_CONNECTIONS: Final = 16
"""Connections at once; one more is closed unanswered."""

MAX_SECONDS: Final = 10.0
"""From accepting a connection to the end of its answer; after that it is closed."""


@dataclass(frozen=True, slots=True)
class MetricsEndpoint:
    """A running HTTP endpoint that serves ``/metrics``."""

    address: str
    """``host:port`` as bound."""
    _server: WSGIServer
    _thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://{self.address}/metrics"

    def close(self) -> None:
        """Stop listening and wait for the endpoint's thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def listen(registry: CollectorRegistry, host: str, port: int, *, max_seconds: float = MAX_SECONDS) -> MetricsEndpoint:
    """Serve ``registry`` over HTTP on a thread of its own.

    Args:
        host: a name or address without brackets.
        port: 0 picks a free one.
        max_seconds: how long one connection may last.

    Raises:
        OSError: the address cannot be bound.
    """
    family, *_, (bare_host, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]

    class Server(_LimitedServer):
        address_family = family

    server: Any = make_server(str(bare_host), port, make_wsgi_app(registry), Server, _SilentHandler)
    server.max_seconds = max_seconds
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    shown = f"[{host}]" if ":" in host else host
    return MetricsEndpoint(f"{shown}:{server.server_port}", server, thread)


class _SilentHandler(WSGIRequestHandler):
    """Answers one request; logs nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is no news."""


class _LimitedServer(ThreadingMixIn, WSGIServer):
    """A thread for each of a few connections, each for a few seconds."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_seconds = MAX_SECONDS
        self._lock = threading.Lock()
        self._began_seconds: dict[Any, float] = {}  # of each open connection

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Take a connection in, if there is room."""
        with self._lock:
            if len(self._began_seconds) >= MAX_CONNECTIONS:
                return False
            self._began_seconds[request] = time.monotonic()
        return True

    def service_actions(self) -> None:
        """Called twice a second: end the connections that have had their time."""
        oldest = time.monotonic() - self.max_seconds
        with self._lock:
            late = [request for request, began in self._began_seconds.items() if began < oldest]
        for request in late:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)  # its thread meets the end of what it reads or writes

    def shutdown_request(self, request: Any) -> None:
        """The connection is over."""
        super().shutdown_request(request)
        with self._lock:
            self._began_seconds.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves before its answer is its own affair."""
