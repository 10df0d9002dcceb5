"""The steps on disk that a checkpoint's safety rests on, each one made durable before it is counted on."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from checkpoint.disk.manifest import FileEntry
from checkpoint.errors import CheckpointError

COPY_BYTES = 16 << 20
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

BeforeStep = Callable[[str], None]
"""Called with a step's name just before it is taken; may stop the process, or raise, to prove what is left behind."""


class Disk:
    """Takes the steps of a commit, and names each before it is taken, so that tests can stop at any of them.

    An ``OSError`` of a step becomes a ``CheckpointError`` that names the file.
    """

    def __init__(self, before_step: BeforeStep | None = None) -> None:
        self._before_step = before_step

    def step(self, what: str, path: Path) -> _Step:
        """Use as ``with disk.step("rename", path): os.rename(...)``."""
        return _Step(self._before_step, what, path)

    def write_file(self, path: Path, data: bytes) -> FileEntry:
        """Write a new file and flush it to disk."""
        fd = self.create(path)
        try:
            self.write(fd, path, memoryview(data))
            self.flush(fd, path)
        finally:
            os.close(fd)
        return FileEntry(len(data), hashlib.sha256(data).hexdigest())

    def copy_file(self, source: Path, path: Path) -> FileEntry:
        """Copy a file, flush the copy to disk and return what was written, hashed on the way."""
        digest = hashlib.sha256()
        num_bytes = 0
        fd = self.create(path)
        try:
            with self.step("read", source), open(source, "rb") as file:
                while data := file.read(COPY_BYTES):
                    digest.update(data)
                    num_bytes += len(data)
                    self.write(fd, path, memoryview(data))
            self.flush(fd, path)
        finally:
            os.close(fd)
        return FileEntry(num_bytes, digest.hexdigest())

    def create(self, path: Path) -> int:
        """A new file, open for reading and writing; the caller closes it."""
        with self.step("create", path):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, fd: int, path: Path, data: memoryview, offset: int | None = None) -> None:
        """Write all of ``data``, at ``offset`` or at the file's position."""
        with self.step("write", path):
            while len(data) > 0:
                if offset is None:
                    data = data[os.write(fd, data) :]
                else:
                    count = os.pwrite(fd, data, offset)
                    data, offset = data[count:], offset + count

    def flush(self, fd: int, path: Path) -> None:
        """Have the file's bytes on the disk itself."""
        with self.step("flush", path):
            os.fsync(fd)

    def make_folders(self, path: Path) -> None:
        """Make a folder and those above it, as far as they are missing, and have their names on the disk itself."""
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        with self.step("make", path):
            path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            self.flush_folder(folder.parent)

    def flush_folder(self, path: Path) -> None:
        """Have the folder's entries on the disk itself: without this a rename may be lost when power fails."""
        with self.step("flush", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        with self.step("rename", target):
            os.rename(source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        """Let two names change places at once; ``False``, and no change, where the system cannot."""
        with self.step("exchange", other):
            return _exchange(one, other)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder that no longer counts; what cannot be removed stays for the next writer to try."""
        with self.step("remove", path):
            shutil.rmtree(path, ignore_errors=True)


class _Step:
    """One step: announced before, its error named after."""

    def __init__(self, before_step: BeforeStep | None, what: str, path: Path) -> None:
        self._before_step = before_step
        self._what = what
        self._path = path

    def __enter__(self) -> None:
        try:
            if self._before_step is not None:
                self._before_step(f"{self._what} {self._path.name}")
        except OSError as error:
            raise self._named(error) from error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise self._named(error) from error

    def _named(self, error: OSError) -> CheckpointError:
        hint = "; the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return CheckpointError(self._path.name, f"{self._what} failed: {error.strerror}{hint}")


def _exchange(one: Path, other: Path) -> bool:
    """Linux's ``renameat2`` with RENAME_EXCHANGE; some file systems (network ones above all) do not have it."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    done = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE))
    if done == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(other))
