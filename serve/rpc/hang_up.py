"""Ends every connection of a listening address, so that calls nobody answers end with UNAVAILABLE.

gRPC's own shutdown cancels the calls that it has accepted and no handler has seen. Their clients meet CANCELLED, as if
nobody wanted the answer, and retry nothing. A connection that closes means UNAVAILABLE to every client.
"""

from __future__ import annotations

import os
import socket
from typing import Final

_DESCRIPTORS: Final = "/dev/fd"
"""This process's, on Linux and macOS."""


def hang_up(address: str) -> None:
    """Accept no more connections at ``address`` and close those there are, once what was written to them has left.

    Args:
        address: as bound, ``host:port`` or ``unix:/path``.
    """
    for descriptor in os.listdir(_DESCRIPTORS):
        try:
            # A copy: gRPC's threads may close their own at any moment, but not this one.
            copy = os.dup(int(descriptor))
        except OSError:
            continue
        try:
            end = socket.socket(fileno=copy)
        except OSError:  # no socket
            os.close(copy)
            continue
        with end:
            if _is_at(end, address):
                _shut(end)


def _is_at(end: socket.socket, address: str) -> bool:
    """Whether the socket's own end is the address; a client's own end never is."""
    if end.type != socket.SOCK_STREAM:
        return False
    try:
        name = end.getsockname()
    except OSError:
        return False
    if address.startswith("unix:"):
        return bool(name == address.removeprefix("unix:").removeprefix("//"))
    # The port alone: a server that listens on all interfaces has connections on each of them.
    return end.family in (socket.AF_INET, socket.AF_INET6) and name[1] == int(address.rpartition(":")[2])


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:  # the client was quicker
        return
