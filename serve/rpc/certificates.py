"""The certificates of the gRPC ports, as their files hold them now."""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path

import grpc

from serve.errors import ConfigError
from serve.listening import RpcConfig

_Mark = tuple[tuple[int, int, int], ...]

_log = logging.getLogger(__name__)


class Certificates:
    """Reads the files of ``rpc.tls_*`` at the start, and again before a handshake that finds them changed.

    Files that cannot be read or do not fit each other change nothing: the pair before them goes on being served, and each
    such state of the files is logged once. Connections that exist are left alone. gRPC asks from threads of its own.
    """

    def __init__(self, rpc: RpcConfig) -> None:
        """
        Raises:
            ConfigError: the files cannot be read, or are no certificate with its key.
        """
        self._certificate, self._key = Path(rpc.tls_cert), Path(rpc.tls_key)
        self._client_ca = Path(rpc.tls_client_ca) if rpc.tls_client_ca else None
        self._lock = threading.Lock()
        self._seen: _Mark | str | None = None  # the files as last looked at, or why they could not be
        try:
            self._seen = self._mark()
            first = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"rpc.tls_cert, rpc.tls_key, rpc.tls_client_ca: {error}") from error
        self.credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            first,
            self._changed,  # type: ignore[arg-type]  # the stubs leave out that None keeps what is served
            require_client_authentication=self._client_ca is not None,
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What new files hold; ``None`` to go on with what is served."""
        with self._lock:
            try:
                mark = self._mark()
                if mark == self._seen:
                    return None
                found = self._read()
                if self._mark() != mark:
                    return None  # being written: the next handshake looks again
            except (OSError, ValueError) as error:
                self._refused(str(error))
                return None
            self._seen = mark
            _log.info("new certificates are served from %s", self._certificate)
            return found

    def _refused(self, why: str) -> None:
        try:
            state: _Mark | str = self._mark()
        except OSError:
            state = why
        if state != self._seen:
            self._seen = state
            _log.error("the certificates before go on being served: %s", why)

    def _files(self) -> list[Path]:
        return [self._certificate, self._key] + ([self._client_ca] if self._client_ca else [])

    def _mark(self) -> _Mark:
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in (file.stat() for file in self._files()))

    def _read(self) -> grpc.ServerCertificateConfiguration:
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
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=roots)
