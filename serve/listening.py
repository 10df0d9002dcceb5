"""Where the server listens, and to whom: addresses, TLS, tokens, connections."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from serve.rules import require, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class RpcConfig:
    """Where the server listens, and what it accepts."""

    host: str = "127.0.0.1"
    """Loopback unless asked otherwise."""

    port: int = 50051
    """0 picks a free port; the start-up line says which."""

    metrics_port: int = 9400
    """Prometheus, on the same host; 0 picks a free port. It speaks TLS where the gRPC port does, and asks for a token with the
    scope ``metrics`` where there are tokens."""

    admin_address: str = "auto"
    """``auto``: the Admin service shares the port on a loopback host and is off elsewhere. ``off``, ``host:port`` or
    ``unix:/path`` say otherwise. Beyond loopback it needs TLS, with tokens or certificates of clients."""

    reflection: Literal["auto", "on", "off"] = "auto"
    """``auto`` is on for a loopback host, off elsewhere; or ``on``, ``off``."""

    orca: Literal["auto", "on", "off"] = "auto"
    """ORCA load reports for clients that balance by ``weighted_round_robin``, as a stream and at the end of calls. Whoever may
    connect may read the stream, since gRPC sends no token with it, so ``auto`` is on exactly where no tokens are asked for."""

    insecure_public: bool = False
    """Allows a host that is not loopback without TLS: calls, tokens and answers can be read on their way."""

    tls_cert: str = ""
    """The server's certificate with its chain, in PEM: the gRPC ports and the metrics port speak TLS. Read again when
    the file changes."""

    tls_key: str = ""
    """The key of ``tls_cert``, in PEM, without a password."""

    tls_client_ca: str = ""
    """Certificates in PEM; only clients that show one signed by these are answered."""

    tokens: str = ""
    """File of hashed tokens that ``tessera-serve token`` makes: only calls that carry one of them are answered, but for health.
    Read again when the file changes. Empty: everyone may call everything."""

    audit_log: str = ""
    """File to which a line is written of every call but health checks: who, what, how much, status, never what was said. It may
    be rotated at any time. Empty: none."""

    audit_format: Literal["json", "text"] = "json"
    """How the lines of ``audit_log`` are written."""

    access_log_sample: float = 0.0
    """Share of the calls, from 0 to 1, of which the same line goes to the server's log."""

    max_message_bytes: int = 8 * 1024 * 1024
    """Largest request message; larger ones are refused by gRPC before they are decoded, and without a word about the field."""

    max_connections: int = 4096
    """Connections to the gRPC port at once; one more is closed unanswered. Each takes a file descriptor."""

    max_streams: int = 4096
    """Calls under way on one connection; one more ends with UNAVAILABLE, in the client that makes it."""

    connection_idle_seconds: float = 300.0
    """A connection without a call for this long is closed; clients open a new one when they need it."""

    connection_age_seconds: float = 3600.0
    """A connection this old takes no new calls; those on it go on, and clients open a new one for the next."""

    drain_seconds: float = 30.0
    """After SIGTERM, time for calls in flight to finish."""

    drain_least_seconds: float = 0.0
    """After SIGTERM, the least time in which the server says NOT_SERVING and refuses calls before it closes connections: what a
    balancer needs to hear of it. Behind HAProxy with our configuration, 2."""

    stream_buffer_events: int = 1024
    """Events held for a client that reads slowly; when the buffer stays full the call ends with RESOURCE_EXHAUSTED."""

    slow_reader_seconds: float = 10.0
    """How long a stream's buffer may stay full."""

    def __post_init__(self) -> None:
        for name in ("port", "metrics_port"):
            require(0 <= getattr(self, name) <= 65535, f"rpc.{name}", getattr(self, name), "lie between 0 and 65535")
        require(self.max_message_bytes >= 1024, "rpc.max_message_bytes", self.max_message_bytes, "be at least 1024")
        require(self.stream_buffer_events >= 16, "rpc.stream_buffer_events", self.stream_buffer_events, "be at least 16")
        require(
            math.isfinite(self.drain_seconds) and self.drain_seconds >= 0,
            "rpc.drain_seconds",
            self.drain_seconds,
            "be 0 or more",
        )
        require(
            0 <= self.drain_least_seconds <= self.drain_seconds,
            "rpc.drain_least_seconds",
            self.drain_least_seconds,
            "lie between 0 and rpc.drain_seconds",
        )
        require(
            1 <= self.max_connections <= 1_000_000, "rpc.max_connections", self.max_connections, "lie between 1 and 1000000"
        )
        require(1 <= self.max_streams <= 1_000_000, "rpc.max_streams", self.max_streams, "lie between 1 and 1000000")
        for name in ("connection_idle_seconds", "connection_age_seconds"):
            # gRPC counts in milliseconds of 31 bits.
            require(1 <= getattr(self, name) <= 2_000_000, f"rpc.{name}", getattr(self, name), "lie between 1 and 2000000")
        require(0 <= self.access_log_sample <= 1, "rpc.access_log_sample", self.access_log_sample, "lie between 0 and 1")
        require_positive("rpc.slow_reader_seconds", self.slow_reader_seconds)
        require(bool(self.tls_cert) == bool(self.tls_key), "rpc.tls_cert", self.tls_cert, "be given together with rpc.tls_key")
        require(
            not self.tls_client_ca or bool(self.tls_cert), "rpc.tls_client_ca", self.tls_client_ca, "be given with rpc.tls_cert"
        )
        require(
            not self.tls_cert or not self.host.startswith("unix:"),
            "rpc.tls_cert",
            self.tls_cert,
            "not be given with a unix: rpc.host, which is guarded by the socket's folder",
        )
        require(
            self.is_loopback or bool(self.tls_cert) or self.insecure_public,
            "rpc.host",
            self.host,
            "be a loopback address unless rpc.tls_cert and rpc.tls_key are given, or rpc.insecure_public is set",
        )
        # Whoever gets in there may drain the server: that the way is private says nothing of who comes along it.
        require(
            self._is_admin_private or (bool(self.tls_cert) and bool(self.tokens or self.tls_client_ca)) or self.insecure_public,
            "rpc.admin_address",
            self.admin_address,
            "be off, auto, a loopback host:port or unix:/path unless rpc.tls_cert and rpc.tls_key are given with rpc.tokens or "
            "rpc.tls_client_ca, or rpc.insecure_public is set",
        )

    @property
    def is_loopback(self) -> bool:
        return _is_loopback(self.host)

    @property
    def _is_admin_private(self) -> bool:
        address = self.admin_address
        return address in ("auto", "off") or address.startswith("unix:") or _is_loopback(address.rpartition(":")[0])


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "[::1]") or host.startswith(("127.", "unix:"))
