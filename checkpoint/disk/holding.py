"""Keeps a checkpoint's folder where it is while somebody needs it: a lock that is asked for before an old one is removed.

The lock is the system's advisory one of the folder itself (``flock``): shared by all who hold it, and gone with their processes
however those end. A descriptor that only reads is enough for it, so a read-only mount or another user's folder can be held too.
Machines that share a network file system may not see each other's locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from checkpoint.errors import CheckpointError

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
"""What file systems say that have no such locks, or none for a descriptor that only reads."""


class Hold:
    """A folder that is needed: who removes old checkpoints leaves it alone until ``release`` or this object's end."""

    def __init__(self, path: Path, fd: int, *, locked: bool) -> None:
        """Takes the descriptor over."""
        self.path = path
        self.locked = locked
        """False where the file system has no locks: then nothing keeps the folder."""
        self._identity = os.fstat(fd)
        self._close = weakref.finalize(self, os.close, fd)

    def release(self) -> None:
        """Let the folder go; once more does no harm."""
        self._close()

    def fate(self) -> Literal["in place", "replaced", "gone"]:
        """What has become of the folder: ``replaced`` where its path is another one's by now."""
        try:
            there = self.path.stat()
        except OSError:
            return "gone"
        return "in place" if os.path.samestat(there, self._identity) else "replaced"


def hold(path: Path) -> Hold:
    """Hold a checkpoint's folder.

    Raises:
        CheckpointError: there is no such folder, or it is being removed at this moment.
    """
    try:
        fd = _open(path)
    except OSError as error:
        raise CheckpointError(str(path), f"the folder cannot be opened: {error.strerror}") from error
    try:
        locked = _lock(fd, fcntl.LOCK_SH)
    except BlockingIOError:
        os.close(fd)
        raise CheckpointError(str(path), "is being removed or written at this moment") from None
    held = Hold(path, fd, locked=locked)
    if held.fate() != "in place":  # between the opening and the lock
        raise CheckpointError(str(path), "was removed or replaced while it was being opened; open it again")
    return held


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Within, nobody begins to hold the folder, which may be removed; False where somebody holds it.

    Also True where that cannot be told: on a file system without locks, or of a folder that cannot be opened.
    """
    try:
        fd = _open(path)
    except OSError:
        yield True
        return
    try:
        try:
            _lock(fd, fcntl.LOCK_EX)
            free = True
        except BlockingIOError:
            free = False
        yield free
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _lock(fd: int, kind: int) -> bool:
    """Lock at once; False where there are no locks, ``BlockingIOError`` where another has one that this may not be beside."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return False
    return True
