"""Processes that are held from outside: one thread of them for good, or all of them most of the time."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_SEIZE, _INTERRUPT, _ANY_THREAD = 0x4206, 0x4207, 0x40000000
_STOPPED_SECONDS, _RUNS_SECONDS = 0.1, 0.05


def hang(pid: int) -> None:
    """Stop the first thread of a process for good, and none of its others, as a debugger does. Killing it still ends it."""
    done = threading.Event()
    failure: list[OSError] = []

    def hold() -> None:
        # The thread that takes hold of another must stay: with its end the other would go on.
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        for request in (_SEIZE, _INTERRUPT):
            if libc.ptrace(request, pid, None, None) < 0:
                failure.append(OSError(ctypes.get_errno(), "ptrace"))
        done.set()
        with suppress(ChildProcessError):  # it has ended
            while not failure:
                _, status = os.waitpid(pid, _ANY_THREAD)
                if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                    return

    threading.Thread(target=hold, daemon=True).start()
    done.wait()
    if failure:
        raise failure[0]


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """Within, a process runs for a third of the time."""
    over = threading.Event()

    def slow() -> None:
        while not over.is_set():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                over.wait(_STOPPED_SECONDS)
                os.kill(pid, signal.SIGCONT)
            over.wait(_RUNS_SECONDS)

    thread = threading.Thread(target=slow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
