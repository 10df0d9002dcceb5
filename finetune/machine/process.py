"""How a process of training lives: one rank of several, never longer than who started it, ended without a race."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NoReturn

from finetune.machine import inventory

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        sys.exit(1)


@contextmanager
def without_collection() -> Iterator[None]:
    """Import within what is large: nobody looks for garbage meanwhile, and what is there afterwards counts as old.

    The modules of torch, DeepSpeed and transformers are some 400,000 objects, of which none is garbage. Python would look
    through them again and again while they grow, about a fifth of what their import takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # into the oldest generation, all at once
        if was_enabled:
            gc.enable()


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


def rank_environment(ranks: int, threads: int) -> dict[str, str]:
    """What makes processes of this machine the ranks of one run, but for RANK and LOCAL_RANK."""
    return {
        "PATH": inventory.search_path(),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "GLOO_SOCKET_IFNAME": "lo",  # the host's name need not resolve
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONUNBUFFERED": "1",
        "TESSERA_PARENT": str(os.getpid()),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
