"""A run's own folder below ``offload.path`` for its swap files: held while one of its processes lives, removed with the last.

Every process of a run that uses the folder holds a shared lock on a file in it; the kernel gives that lock back however the
process ends. Who gets the lock alone knows that nobody uses the folder, and removes it. So no two runs share a file, of one
``run.output`` either; ranks on a node of their own have a folder of the same name on their own disk.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from finetune.config import TuneConfig
from finetune.errors import ConfigError

_NAME = re.compile(r"tessera-run-[0-9a-f]{32}")
_LOCK = ".lock"


@contextmanager
def claimed_swap(config: TuneConfig, say: Callable[[str], None]) -> Iterator[Path | None]:
    """A new folder for the swap files of a run, held until the end of the context; ``None`` if nothing goes to NVMe.

    What runs left that did not come to their end is removed first.

    Args:
        say: told of what is removed.

    Raises:
        ConfigError: ``offload.path`` cannot be made, written or locked.
    """
    if not config.offload.on_disk:
        yield None
        return
    assert config.offload.path is not None, "OffloadConfig asks for a path"
    root = Path(config.offload.path).expanduser().absolute()
    with held_swap(root / f"tessera-run-{uuid.uuid4().hex}") as folder:
        clear_leftovers(root, say)
        yield folder


@contextmanager
def held_swap(folder: Path | None) -> Iterator[Path | None]:
    """Hold a run's folder, made where it is not there; whoever lets go of it last removes it.

    Raises:
        ConfigError: it cannot be made or locked.
    """
    if folder is None:
        yield None
        return
    with _hold(folder) as lock:
        try:
            yield folder
        finally:
            _remove_unless_held(folder, lock)


def clear_leftovers(root: Path, say: Callable[[str], None]) -> None:
    """Remove the folders of runs of which no process lives, and say how much that gave back."""
    for folder in sorted(root.glob("tessera-run-*")):
        if not _NAME.fullmatch(folder.name) or folder.is_symlink():
            continue
        freed = _bytes_below(folder)
        try:
            with (folder / _LOCK).open("a+b") as lock:
                removed = _remove_unless_held(folder, lock)
        except OSError:  # another user's, or just removed
            continue
        if removed:
            say(f"removed {freed >> 20:,} MiB of swap files in {folder}, left by a run that was killed")


def _hold(folder: Path) -> BinaryIO:
    """The open lock file of ``folder``, locked. While it is made another run may clear it away; then it is made again."""
    while True:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                folder.mkdir()
            try:
                lock = (folder / _LOCK).open("a+b")
            except FileNotFoundError:
                continue
        except OSError as error:
            rule = "name a folder on a local disk that this user may write"
            raise ConfigError(f"offload.path: {folder.parent} cannot be written: {error.strerror}; {rule}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
        except OSError as error:
            lock.close()
            shutil.rmtree(folder, ignore_errors=True)
            rule = "name a folder on a local disk: runs that share one are told apart by locks"
            raise ConfigError(f"offload.path: files in {folder.parent} cannot be locked: {error.strerror}; {rule}") from error
        if _is_there(folder, lock):
            return lock
        lock.close()


def _is_there(folder: Path, lock: BinaryIO) -> bool:
    """Whether the locked file is still the one in ``folder``."""
    try:
        return os.path.samestat(os.stat(folder / _LOCK), os.fstat(lock.fileno()))
    except OSError:
        return False


def _remove_unless_held(folder: Path, lock: BinaryIO) -> bool:
    """Remove ``folder`` if nobody else holds it. An own shared lock is given up in either case."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        fcntl.flock(lock, fcntl.LOCK_UN)
        return False
    if not _is_there(folder, lock):
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def _bytes_below(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(Path(place) / name, follow_symlinks=False).st_size
    return total
