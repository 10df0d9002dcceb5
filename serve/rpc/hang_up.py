"""Ends every connection of a listening address, so that calls nobody answers end with UNAVAILABLE.

gRPC's own shutdown cancels the calls that it has accepted and no handler has seen. Their clients meet CANCELLED, as if
nobody wanted the answer, and retry nothing. A connection that closes means UNAVAILABLE to every client.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from typing import Final

_LOOK_AGAIN_SECONDS: Final = 0.001
_MOST_SECONDS_BETWEEN_LOOKS: Final = 0.02
_DESCRIPTORS: Final = "/dev/fd"
"""This process's, on Linux and macOS."""


async def say_goodbye(address: str, at_most_seconds: float) -> None:
    """Write nothing more to the connections there are at ``address``, and wait until their clients have closed them.

    A client reads all that was written before it learns of the end. Closed from here, a connection would be lost to a
    client that is writing to it just then, with the answers that it had not read yet. Who listens there goes on, and
    connections that come meanwhile are left alone. The server's own next write to a connection, which fails, ends it.

    Args:
        address: as bound, ``host:port`` or ``unix:/path``.
        at_most_seconds: a client that does not read keeps nobody waiting longer; 0 says no goodbye.

    Raises:
        OSError: this process has all the descriptors that it may have; some connections may still be written to.
    """
    if at_most_seconds <= 0:
        return
    ended = set()
    for end in _connections(address):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_WR)
            ended.add(_identity(end))
    deadline = asyncio.get_running_loop().time() + at_most_seconds
    pause = _LOOK_AGAIN_SECONDS
    while ended and (left := deadline - asyncio.get_running_loop().time()) > 0:
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, _MOST_SECONDS_BETWEEN_LOOKS)
        ended.intersection_update([_identity(end) for end in _connections(address)])


def hang_up(address: str) -> None:
    """Close the connections there are at ``address``, once what was written to them has left.

    Who listens there goes on: stop that at once, before a client can come back.

    Args:
        address: as bound, ``host:port`` or ``unix:/path``.

    Raises:
        OSError: this process has all the descriptors that it may have; some connections may be left.
    """
    for end in _connections(address):
        with contextlib.suppress(OSError):  # the client was quicker
            end.shutdown(socket.SHUT_RDWR)


def _connections(address: str) -> Iterator[socket.socket]:
    """The server's end of each connection to the address, open until the next is asked for."""
    for end in _sockets():
        with end:
            if _is_connection_at(end, address):
                yield end


def _identity(end: socket.socket) -> int:
    """A number that every descriptor of the socket has, and no other open socket's."""
    return os.fstat(end.fileno()).st_ino


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
