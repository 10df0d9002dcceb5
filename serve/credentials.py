"""What every command takes to prove who asks: options, environment variables and files, for gRPC and for the metrics alike."""

from __future__ import annotations

import argparse
import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

SYSTEM: Final = "system"
"""In place of a file of authorities: those that are trusted by default."""
TOKEN_RULE: Final = "visible ASCII characters without spaces"
VARIABLES: Final[Mapping[str, str]] = {
    "ca": "TESSERA_CA",
    "cert": "TESSERA_CLIENT_CERT",
    "key": "TESSERA_CLIENT_KEY",
    "server_name": "TESSERA_SERVER_NAME",
}
"""The environment variable that holds what an option of TLS does, by the option's name in a namespace."""
NEEDS_TLS: Final = (
    f"a client's certificate, key or server name needs TLS: give --ca ({VARIABLES['ca']}), a file or the word {SYSTEM}"
)

_TOKEN: Final = re.compile(r"[\x21-\x7e]+")


def add_connection_group(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The group of options about the connection; those of TLS and tokens follow, see ``add_credentials``."""
    return parser.add_argument_group(
        "connection",
        "What is left out is read from the environment; a token never stands on the command line, which others see.",
    )


def add_credentials(group: argparse._ArgumentGroup) -> None:
    """The options of TLS and of the token."""
    group.add_argument("--ca", metavar="FILE", help=f"TLS, trusting these authorities; {SYSTEM}: the usual ones (TESSERA_CA)")
    group.add_argument("--cert", metavar="FILE", help="your own certificate, for a server that asks (TESSERA_CLIENT_CERT)")
    group.add_argument("--key", metavar="FILE", help="its key (TESSERA_CLIENT_KEY)")
    group.add_argument("--server-name", metavar="NAME", help="the name in the server's certificate (TESSERA_SERVER_NAME)")
    group.add_argument("--plain", action="store_true", help="no TLS, also where the environment names files for it")
    group.add_argument("--token-file", metavar="FILE", help="file that holds the token (TESSERA_TOKEN is the token itself)")
    group.add_argument("--plain-token", action="store_true", help="let the token leave this machine without TLS")


def chosen_tls(arguments: argparse.Namespace) -> dict[str, str]:
    """What the options of TLS say, by environment variable; without those that were not given."""
    given = {variable: getattr(arguments, option) for option, variable in VARIABLES.items()}
    return {variable: value for variable, value in given.items() if value is not None}


def read_token(file: str) -> str:
    """The token that a file holds.

    Raises:
        ValueError: it cannot be read, or holds none.
    """
    try:
        token = read(file).decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must hold a token: {TOKEN_RULE}") from error
    if not token:
        raise ValueError(f"{file} is empty; it must hold a token")
    return token


def check_token(token: str) -> None:
    """
    Raises:
        ValueError: it is none. It is not shown: it may be one with a line break.
    """
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"the token must be {TOKEN_RULE}")


def read(file: str | Path) -> bytes:
    """
    Raises:
        ValueError: the file cannot be read; the message names it.
    """
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error


def is_loopback(host: str) -> bool:
    """Whether a name or an address, without a port, is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
