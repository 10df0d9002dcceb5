"""A process that has imported what others need, and becomes them by forking: ``python -m host.fork_server FD MODULE ...``.

Importing torch, transformers and DeepSpeed takes a process three to five seconds of computing; a fork of one that has done so
begins within some ten milliseconds, and shares their memory. Nothing is computed here before a fork, and no thread of ours is
started: a pool of threads would be lost in it, and those who wait for one wait for ever.

Told over the socket ``FD`` by ``host.forked``, whose process must be a subreaper: every process made here loses its parent at
once and so becomes that process's own child, which waits for it as for any other.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import Final, NoReturn, TypedDict

from host.process import end_process, name_process

LENGTH: Final = struct.Struct("!I")
NOTHING: Final = LENGTH.pack(0)
"""The answer where no process could be made, instead of its number."""
MAX_DESCRIPTORS: Final = 32
_ABOVE: Final = 64
"""Descriptors that came are put here first: none is overwritten by another's place."""
_FOR_OTHERS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that are meant for the process that is served here, which ends all others when it ends."""


class Order(TypedDict):
    """What a new process shall be. Goes over the socket as JSON; beside it go its descriptors 0, 1, 2, 3 and so on."""

    call: str
    """``module:function``: takes a list of words, returns the exit code."""
    words: list[str]
    environment: dict[str, str]
    new_session: bool


def serve(fd: int, modules: Sequence[str]) -> None:
    """Import ``modules``, then make processes until the other end closes."""
    parent = os.getppid()
    name_process("tessera-forks")
    for number in _FOR_OTHERS:
        signal.signal(number, signal.SIG_IGN)
    # Said where the system counts more than one thread: those of numpy's OpenBLAS, which knows of forks.
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork.*", category=DeprecationWarning)
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    # No fork writes to these objects' pages while it looks for garbage. What is garbage among them already, some thousands of
    # small objects, is left there: to look for it would be a fifteenth of the start.
    gc.freeze()
    gc.enable()
    with socket.socket(fileno=fd) as orders:
        while (received := _receive(orders)) is not None:
            try:
                _fork(*received, orders, parent)
            except OSError:
                traceback.print_exc()
                orders.sendall(NOTHING)


def _fork(order: Order, descriptors: list[int], orders: socket.socket, parent: int) -> None:
    """Have the process made. It tells its number only when nothing of what it was handed is open here any more.

    Else whoever waits for the other end of its pipes or sockets to be closed would wait for this process too, after that one's
    death: on a busy machine it may be long before this one runs again.
    """
    open_here = list(descriptors)
    try:
        closed, closes = os.pipe()
        open_here += closed, closes
        if (between := os.fork()) == 0:
            os.close(closes)
            _fork_again(order, descriptors, orders, parent, closed)
    finally:
        for descriptor in open_here:
            os.close(descriptor)
    os.waitpid(between, 0)


def _fork_again(order: Order, descriptors: list[int], orders: socket.socket, parent: int, closed: int) -> NoReturn:
    """Make the process and end, which makes it ``parent``'s own, once the other end of ``closed`` has been closed."""
    try:
        forked_by = os.getpid()
        if os.fork() == 0:
            os.close(closed)
            _become(order, descriptors, orders, forked_by, parent)
        os.read(closed, 1)
    except OSError:
        traceback.print_exc()
        orders.sendall(NOTHING)
    finally:
        os._exit(0)


def _receive(orders: socket.socket) -> tuple[Order, list[int]] | None:
    head, descriptors, _, _ = socket.recv_fds(orders, LENGTH.size, MAX_DESCRIPTORS)
    if len(head) < LENGTH.size:
        return None
    left, parts = LENGTH.unpack(head)[0], []
    while left and (part := orders.recv(left)):
        parts.append(part)
        left -= len(part)
    return (json.loads(b"".join(parts)), descriptors) if not left else None


def _become(order: Order, descriptors: list[int], orders: socket.socket, forked_by: int, parent: int) -> NoReturn:
    """Be the new process until it ends."""
    try:
        if order["new_session"]:
            os.setsid()
        raised = [_raised(descriptor) for descriptor in descriptors]
        for number in _FOR_OTHERS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        while os.getppid() == forked_by:  # which ends now
            time.sleep(0.0002)
        if os.getppid() != parent:  # the process that asked has ended
            os._exit(1)
    except BaseException:
        traceback.print_exc()
        orders.sendall(NOTHING)
        os._exit(1)
    orders.sendall(LENGTH.pack(os.getpid()))
    orders.close()
    code = 1
    try:
        for place, descriptor in enumerate(raised):
            os.dup2(descriptor, place, inheritable=place < 3)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(order["environment"])
        module, _, function = order["call"].partition(":")
        sys.argv = [module, *order["words"]]
        code = getattr(importlib.import_module(module), function)(order["words"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    end_process(code)


def _raised(descriptor: int) -> int:
    """The open file of a descriptor at a number that no place has; the old number is closed."""
    again = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
    os.close(descriptor)
    return again


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
