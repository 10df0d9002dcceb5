"""How a metrics port is reached: TLS, tokens, and the environment variables for them, named as those of the clients."""

from __future__ import annotations

import argparse
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPSConnection
from typing import Final, Self
from urllib.parse import SplitResult, urlsplit

from serve.credentials import (
    NEEDS_TLS,
    SYSTEM,
    VARIABLES,
    add_connection_group,
    add_credentials,
    check_token,
    chosen_tls,
    is_loopback,
    read_token,
)

DEFAULT_ADDRESS: Final = "127.0.0.1:9400"

_PATH: Final = "/metrics"


@dataclass(frozen=True, slots=True)
class Place:
    """A metrics port, and what it is told of who asks."""

    url: str
    tls: ssl.SSLContext | None = None
    """``None``: without TLS."""
    server_name: str = ""
    """The name that the server's certificate must have; empty: the host of the address."""
    token: str = field(default="", repr=False)

    @classmethod
    def of(cls, arguments: argparse.Namespace, environment: Mapping[str, str]) -> Self:
        """What the options of ``add_arguments`` say, and the environment where they say nothing.

        Raises:
            ValueError: a value breaks its rule, or a token would leave this machine without TLS.
        """
        chosen = chosen_tls(arguments)
        ca, cert, key, server_name = ({**environment, **chosen}.get(variable, "") for variable in VARIABLES.values())
        url = _url(arguments.url, plain=arguments.plain or not ca)
        if arguments.plain and (chosen or url.scheme == "https"):
            raise ValueError("--plain and --ca, --cert, --key, --server-name or an address of https exclude each other")
        if url.scheme == "http" and "://" not in arguments.url and not arguments.plain and (cert or key or server_name):
            raise ValueError(NEEDS_TLS)
        if url.scheme == "http" and chosen:
            raise ValueError(f"{url.geturl()} is without TLS, for which --ca, --cert, --key and --server-name are: say https")
        token = environment.get("TESSERA_TOKEN", "") if arguments.token_file is None else read_token(arguments.token_file)
        if token:
            check_token(token)
        if url.scheme == "https":
            return cls(url.geturl(), _context(ca, cert, key), server_name, token)
        if token and not is_loopback(url.hostname or "") and not arguments.plain_token:
            raise ValueError(
                f"a token would go to {url.netloc} without TLS, for all on the way to read: give --ca, or say --plain-token "
                "where the network is trusted"
            )
        return cls(url.geturl(), token=token)

    def connection(self, timeout_seconds: float) -> HTTPConnection:
        """A new one, not open yet; whoever asks closes it. No proxy of the environment has any business on it."""
        url = urlsplit(self.url)
        host = url.hostname or ""
        if self.tls is None:
            return HTTPConnection(host, url.port, timeout=timeout_seconds)
        return _Named(host, url.port, self.tls, self.server_name or host, timeout_seconds)

    @property
    def target(self) -> str:
        """What is asked for there."""
        url = urlsplit(self.url)
        return (url.path or "/") + (f"?{url.query}" if url.query else "")

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


class _Named(HTTPSConnection):
    """A connection to a server whose certificate may have another name than its address."""

    def __init__(self, host: str, port: int | None, tls: ssl.SSLContext, server_name: str, timeout_seconds: float) -> None:
        super().__init__(host, port, timeout=timeout_seconds, context=tls)
        self._tls, self._server_name = tls, server_name

    def connect(self) -> None:
        HTTPConnection.connect(self)
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._server_name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a command that say where the metrics are and who asks for them."""
    where = f"of the metrics ({DEFAULT_ADDRESS}); the ready line says it"
    parser.add_argument("url", nargs="?", default=DEFAULT_ADDRESS, help=where)
    add_credentials(add_connection_group(parser))


def _url(given: str, *, plain: bool) -> SplitResult:
    """An address as the ready line has it, of what may be less: ``HOST:PORT``, or without the path."""
    url = given if "://" in given else f"{'http' if plain else 'https'}://{given}"
    try:
        parts = urlsplit(url if url.count("/") > 2 else url + _PATH)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or half an address of IPv6
        is_one = False
    if not is_one:
        raise ValueError(f"the address is {given!r}; it must be HOST:PORT, or one of http or https")
    return parts


def _context(ca: str, cert: str, key: str) -> ssl.SSLContext:
    if bool(cert) != bool(key):
        raise ValueError("a client's certificate and its key must be given together")
    try:
        context = ssl.create_default_context(cafile=None if ca in ("", SYSTEM) else ca)
    except ssl.SSLError as error:
        raise ValueError(f"{ca} must hold certificates in PEM: {error}") from error
    except OSError as error:
        raise ValueError(f"{ca} cannot be read: {error.strerror}") from error
    if cert:
        try:
            context.load_cert_chain(cert, key, password="")  # without one OpenSSL would ask at the terminal
        except ssl.SSLError as error:
            raise ValueError(f"{cert} and {key} must be a certificate and its key, in PEM: {error}") from error
        except OSError as error:
            raise ValueError(f"{cert} or {key} cannot be read: {error.strerror}") from error
    return context
