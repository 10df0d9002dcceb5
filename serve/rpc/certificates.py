"""The certificates of the gRPC ports and the metrics port, as their files hold them now."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from serve.errors import ConfigError
from serve.listening import RpcConfig

_Mark = tuple[tuple[int, int, int], ...]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A certificate with its key, in the forms of those who serve it."""

    grpc: grpc.ServerCertificateConfiguration
    context: ssl.SSLContext
    expires_seconds: float


class _Port:
    """What one gRPC port serves. gRPC asks before each handshake, in any thread."""

    def __init__(self, now: Callable[[], _Pair], served: _Pair) -> None:
        self._now = now
        self._served = served
        self._lock = threading.Lock()

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What the port does not serve yet; ``None`` to go on with what it does."""
        with self._lock:
            now = self._now()
            if now is self._served:
                return None
            self._served = now
            return now.grpc


class Certificates:
    """Reads the files of ``rpc.tls_*`` at the start, and again before a handshake that finds them changed.

    Files that cannot be read or do not fit each other change nothing: the pair before them goes on being served, and each
    such state of the files is logged and counted once. Connections that exist are left alone. Any thread may ask.
    """

    def __init__(
        self,
        rpc: RpcConfig,
        *,
        served: Callable[[float], None] = lambda _: None,
        refused: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            served: told of each certificate that is served from now on when it ends, in Unix time.
            refused: called when changed files cannot be served.

        Raises:
            ConfigError: the files cannot be read, or are no certificate with its key.
        """
        self._certificate, self._key = Path(rpc.tls_cert), Path(rpc.tls_key)
        self._client_ca = Path(rpc.tls_client_ca) if rpc.tls_client_ca else None
        self._told_served, self._told_refused = served, refused
        self._lock = threading.Lock()
        self._seen: _Mark | str | None = None  # the state of the files that was last looked at
        self._told: tuple[_Mark | str, str] | None = None  # the state that was last refused, and why
        try:
            self._seen = self._mark()
            self._current = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"rpc.tls_cert, rpc.tls_key, rpc.tls_client_ca: {error}") from error
        served(self._current.expires_seconds)

    def credentials(self) -> grpc.ServerCredentials:
        """What one gRPC port is bound with, and no other: gRPC asks for each what has changed since it asked last."""
        pair = self._now()
        port = _Port(self._now, pair)
        return grpc.dynamic_ssl_server_credentials(
            pair.grpc,
            port.changed,  # type: ignore[arg-type]  # the stubs leave out that None keeps what is served
            require_client_authentication=self._client_ca is not None,
        )

    def wrap(self, connection: socket.socket) -> ssl.SSLSocket:
        """The server's end of TLS over a connection, which it takes over; the handshake is still to be done.

        Raises:
            OSError: the connection is over.
        """
        return self._now().context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def _now(self) -> _Pair:
        with self._lock:
            self._look()
            return self._current

    def _look(self) -> None:
        """Take over what the files hold, if that is new and can be served."""
        state = self._state()
        if state == self._seen:
            return
        try:
            found: _Pair | OSError | ValueError = self._read()
        except (OSError, ValueError) as error:
            found = error
        if self._state() != state:
            return  # being written: the next handshake looks again
        if not isinstance(found, OSError):  # which may pass without a change to the files: there may be a descriptor again
            self._seen = state
        if not isinstance(found, _Pair):
            if (state, str(found)) != self._told:
                self._told = state, str(found)
                self._told_refused()
                _log.error("the certificates before go on being served: %s", found)
            return
        self._current = found
        self._told_served(found.expires_seconds)
        _log.info("new certificates are served from %s", self._certificate)

    def _state(self) -> _Mark | str:
        """The files as they are now, or why they cannot be looked at."""
        try:
            return self._mark()
        except OSError as error:
            return str(error)

    def _files(self) -> list[Path]:
        return [self._certificate, self._key] + ([self._client_ca] if self._client_ca else [])

    def _mark(self) -> _Mark:
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in (file.stat() for file in self._files()))

    def _read(self) -> _Pair:
        from cryptography import x509  # here: servers without TLS need not have it

        certificate, key = self._certificate.read_bytes(), self._key.read_bytes()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # A password, or a key that has one would be asked for at the terminal.
            context.load_cert_chain(self._certificate, self._key, password="")
        except ssl.SSLError as error:
            raise ValueError(
                f"{self._certificate} and {self._key} must be a certificate and its key, in PEM: {error}"
            ) from error
        roots = None if self._client_ca is None else self._client_ca.read_bytes()
        if roots is not None:
            try:
                context.load_verify_locations(cadata=roots.decode("ascii"))
            except (ssl.SSLError, ValueError) as error:
                raise ValueError(f"{self._client_ca} must hold certificates in PEM: {error}") from error
            context.verify_mode = ssl.CERT_REQUIRED
        ends = x509.load_pem_x509_certificates(certificate)[0].not_valid_after_utc
        served = grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=roots)
        return _Pair(served, context, ends.timestamp())
