"""How a process of training lives: one rank of several, never longer than who started it."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from finetune.machine import inventory

LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch's own switch, read at a process' first tensor, which ``pages`` goes by too: what a tensor of 2 MiB or more needs of new
memory is asked of Linux in large pages, since by pages of 4 KiB that takes longer.

glibc's ``glibc.malloc.hugetlb`` would do as much, but has the heap grow and shrink by other rules than the forecast replays.
"""
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


@contextmanager
def stopped_in_order() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP end the command as SIGINT does, so that what it had begun to write is removed."""

    def stop(number: int, _: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
        LARGE_PAGES: os.environ.get(LARGE_PAGES, "1"),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
