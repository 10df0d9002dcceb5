"""What a process of ours is called, and how it ends without taking the interpreter down."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, NoReturn

_PR_SET_NAME: Final = 15
_LAST: Final = 19
"""The greatest niceness."""
_FIRST_OF_ALL: Final = 1000
_BEFORE_ITS_PARENT: Final = 300
"""Thousandths of what may be held."""


def name_process(name: str) -> None:
    """Have the system show this process by a name of at most 15 bytes where it shows no commands (``ps -e``, ``top``)."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def give_way(steps: int) -> None:
    """Let whatever computes go before this thread and those that it starts, ``steps`` of niceness; where a sandbox forbids to
    say so, they compete."""
    me = threading.get_native_id()
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, me, min(_LAST, os.getpriority(os.PRIO_PROCESS, me) + steps))


def be_killed_first(path: Path = Path("/proc/self/oom_score_adj")) -> None:
    """Have the kernel take this process before the one that started it where memory runs out, which ends no call.

    Three tenths of what the machine or the control group may hold count as this process's own on top
    (``proc_pid_oom_score_adj(5)``); whatever an operator has said of the parent counts on. Where a sandbox keeps that from us,
    the kernel chooses as ever.
    """
    with suppress(OSError, ValueError):
        path.write_text(str(min(_FIRST_OF_ALL, int(path.read_text()) + _BEFORE_ITS_PARENT)))


def end_process(code: int) -> NoReturn:
    """End a process as ``sys.exit`` does, but for the interpreter, which is not taken down.

    Threads are waited for, ``atexit`` runs, output is flushed, each also where the one before was interrupted; output that
    nobody takes does not change the code.

    To free every object of torch and transformers one by one takes a second of computing that the system does not need.

    Gloo's threads outlive ``destroy_process_group`` where DeepSpeed still holds the group, and may be about to let go of the
    last collective's tensors. A tensor that Python made needs the interpreter's lock for that; a thread that asks for the lock
    while the interpreter is taken down aborts the process ("terminate called without an active exception": PyTorch's issue
    190489, and pull request 179291, which was given up).
    """
    with ExitStack() as last:
        last.callback(os._exit, code)
        last.callback(ctypes.CDLL(None).fflush, None)  # what libraries in C have written
        last.callback(_flush)
        last.callback(atexit._run_exitfuncs)
        threading._shutdown()  # type: ignore[attr-defined]  # tells pools of threads to end before it waits for them
    raise AssertionError("the process has ended")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
