"""Ports for programs that must be told one."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port(address: str = "127.0.0.1") -> Iterator[int]:
    """A port that the system gives to nobody meanwhile, and that a program may listen at which is told of it.

    Servers bind their sockets also where somebody else's is bound and does not listen: with ``SO_REUSEADDR``, as here.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        port: int = holder.getsockname()[1]
        yield port
