"""Leases on files: while one is held, whoever wants to write to the file or cut it waits, for as long as the system lets them.

See "Leases" of ``fcntl(2)``. A process may have them on files of its own user, or with CAP_LEASE, and not on every file system.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import threading
import weakref


class Leases:
    """Read leases on some files, until they are given back or nobody has this any more. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[int, int], int] = {}
        weakref.finalize(self, _close, self._held)

    def take(self, fd: int) -> bool:
        """Hold up whoever wants to write to an open file, where this process may.

        Args:
            fd: open for reading only; it may be closed afterwards.

        Returns:
            Whether nobody has the file open for writing or waits to open it, as far as that can be found out.
        """
        status = os.fstat(fd)
        file = (status.st_dev, status.st_ino)
        with self._lock:
            if file in self._held:
                return _is_held(self._held[file])
            own = -1
            try:
                own = os.dup(fd)
                fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGURG)  # which is ignored where nobody handles it; SIGIO is not
                fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            except OSError as error:
                if own < 0:
                    return False
                os.close(own)
                return error.errno != errno.EAGAIN
            self._held[file] = own
        return True

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for a lease to be given back; the system takes it away after a while (45 s, by default)."""
        with self._lock:
            return not all(map(_is_held, self._held.values()))

    def give_back(self) -> None:
        """Hold nobody up any more."""
        with self._lock:
            _close(self._held)


def _is_held(fd: int) -> bool:
    """Whether a lease is as it was taken: nobody waits for it, nor has it been taken away."""
    return fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_RDLCK


def _close(held: dict[tuple[int, int], int]) -> None:
    while held:
        _, fd = held.popitem()
        with contextlib.suppress(OSError):  # taken away
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)  # others may have the same open file
        os.close(fd)
