"""Ends every connection of a listening address, so that calls nobody answers end with UNAVAILABLE.

gRPC's own shutdown cancels the calls that it has accepted and no handler has seen. Their clients meet CANCELLED, as if
nobody wanted the answer, and retry nothing. A connection that closes means UNAVAILABLE to every client.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from typing import Final

_DESCRIPTORS: Final = "/dev/fd"
"""This process's, on Linux and macOS."""


def hang_up(address: str) -> None:
    """Close the connections there are at ``address``, once what was written to them has left.

    Who listens there goes on: stop that at once, before a client can come back.

    Args:
        address: as bound, ``host:port`` or ``unix:/path``.

    Raises:
        OSError: this process has all the descriptors that it may have; some connections may be left.
    """
    for end in _sockets():
        with end:
            if _is_connection_at(end, address):
                with contextlib.suppress(OSError):  # the client was quicker
                    end.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[socket.socket]:
    """A copy of each of this process's, one at a time, for the caller to close: gRPC's threads may close their own at any
    moment, but not these.

    Raises:
        OSError: this process may have no descriptor more, not even one.
    """
    for descriptor in os.listdir(_DESCRIPTORS):
        try:
            copy = os.dup(int(descriptor))
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise
            continue
        try:
            yield socket.socket(fileno=copy)
        except OSError:  # a file
            os.close(copy)


def _is_connection_at(end: socket.socket, address: str) -> bool:
    """Whether the socket is the server's end of a connection to the address; a client's own end never is."""
    try:
        name = end.getsockname()
        if end.type != socket.SOCK_STREAM or end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
    except OSError:
        return False
    if address.startswith("unix:"):
        return bool(name == address.removeprefix("unix:").removeprefix("//"))
    # The port alone: a server that listens on all interfaces has connections on each of them.
    return end.family in (socket.AF_INET, socket.AF_INET6) and name[1] == int(address.rpartition(":")[2])
