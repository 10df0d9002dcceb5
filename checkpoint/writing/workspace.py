"""The temporary folder of one writer: how it comes to count, and how what dead writers left is cleared away."""

from __future__ import annotations

import fcntl
import os
import re
import uuid
from pathlib import Path

from checkpoint.disk.durable import Disk
from checkpoint.disk.latest import LATEST
from checkpoint.errors import CheckpointError

_TEMPORARY = re.compile(r"step-\d{8,}\.tmp-[0-9a-f]{32}")
_TEMPORARY_LATEST = re.compile(re.escape(LATEST) + r"\.tmp-[0-9a-f]{32}")
_SET_ASIDE = re.compile(r"(step-\d{8,})\.old-[0-9a-f]{32}")


class TemporaryFolder:
    """A folder that is being written, beside the place it will take.

    Owns a lock on the folder for as long as its process lives: whoever gets that lock knows that the writer is dead.
    """

    def __init__(self, root: Path, name: str, disk: Disk) -> None:
        self._final = root / name
        self._disk = disk
        self.path, self._fd = self._make()

    def _make(self) -> tuple[Path, int]:
        """Make and lock the folder. Between the two another writer's clearing may take it; then make another."""
        while True:
            path = self._final.with_name(f"{self._final.name}.tmp-{uuid.uuid4().hex}")
            with self._disk.step("make", path):
                path.mkdir()
            fd = _try_lock(path)
            if fd is not None and path.exists():
                return path, fd
            if fd is not None:
                os.close(fd)

    def put_in_place(self) -> Path:
        """Give the folder its final name, replacing one that is there, and have that on disk.

        A folder of the same name is exchanged in one step. Where the system cannot, it is set aside first under a name that
        ``resolve_latest`` knows, so that it counts until the new one has taken its place.
        """
        root = self._final.parent
        old: Path | None = None
        if self._final.exists():
            if self._disk.exchange(self.path, self._final):
                old = self.path
            else:
                old = self._final.with_name(f"{self._final.name}.old-{uuid.uuid4().hex}")
                self._disk.rename(self._final, old)
                self._move(back=old)
        else:
            self._disk.rename(self.path, self._final)
        self._disk.flush_folder(root)
        if old is not None:
            self._disk.remove_tree(old)
        self._unlock()
        return self._final

    def _move(self, *, back: Path) -> None:
        """Take the place that was just made free; if that fails, what was there returns to it."""
        try:
            self._disk.rename(self.path, self._final)
        except CheckpointError:
            os.rename(back, self._final)
            raise

    def discard(self) -> None:
        """Remove the folder, whatever is in it."""
        self._disk.remove_tree(self.path)
        self._unlock()

    def _unlock(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def clear_leftovers(root: Path, disk: Disk) -> None:
    """Remove what writers left that died; put back what one had set aside without replacing it."""
    for path in sorted(root.iterdir()):
        if _TEMPORARY.fullmatch(path.name) and path.is_dir():
            fd = _try_lock(path)
            if fd is not None:
                try:
                    disk.remove_tree(path)
                finally:
                    os.close(fd)
        elif _TEMPORARY_LATEST.fullmatch(path.name):
            with disk.step("remove", path):
                path.unlink(missing_ok=True)
        elif match := _SET_ASIDE.fullmatch(path.name):
            final = root / match[1]
            if final.exists():
                disk.remove_tree(path)
            else:
                disk.rename(path, final)


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the folder's lock; ``None`` if it is held or the folder is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd
