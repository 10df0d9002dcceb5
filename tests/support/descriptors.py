"""What this process has open, for tests that nothing more stays open than before."""

from __future__ import annotations

import os


def descriptors() -> set[tuple[int, str]]:
    """Every file descriptor with where it leads: a path, or the kernel's name for a socket, a pipe or a file of memory.

    Compare as sets (``descriptors() <= before``), not by their number: what earlier tests left behind may be closed at any
    moment, by the garbage collector or by a thread that ends.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:  # closed meanwhile, as the listing's own is
            continue
    return found
