"""How a rank's process lives and ends: not beyond the one that started it, and without a race at its own end."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        sys.exit(1)


def end_process(code: int) -> NoReturn:
    """End a process that has communicated: all that ``sys.exit`` does, but the interpreter is not taken down.

    Gloo's threads outlive ``destroy_process_group`` where DeepSpeed still holds the group, and may be about to let go of the
    last collective's tensors. A tensor that Python made needs the interpreter's lock for that; a thread that asks for the lock
    while the interpreter is taken down aborts the process ("terminate called without an active exception": PyTorch's issue
    190489, and pull request 179291, which was given up).
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
