"""Opens the files of a checkpoint's folder, and none outside it."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from checkpoint.errors import CheckpointError

MAX_JSON_BYTES = 256 << 20
"""The largest tokenizer known is near 40 MB; what is larger than this is not a checkpoint's JSON."""

MAX_JSON_DEPTH = 64
"""Levels of nesting; a tokenizer's file has about ten."""

_POINTER = b"version https://git-lfs.github.com/spec/"
"""How a pointer of Git LFS begins, by its specification."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Folder:
    """One checkpoint's folder.

    Every file is a plain name in the folder. A link may point to a place inside it; in a Hugging Face cache, whose snapshots
    are links into the ``blobs`` beside them, also into those.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._roots = [self.path]
        if self.path.parent.name == "snapshots":
            self._roots.append(self.path.parent.parent / "blobs")

    def has(self, name: str) -> bool:
        """Whether there is anything of this name, a dangling link included."""
        return os.path.lexists(self.path / name)

    def identity(self) -> tuple[int, int]:
        """What tells this folder from another that takes its name later."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise CheckpointError(str(self.path), f"the folder cannot be looked at: {error.strerror}") from error
        return status.st_dev, status.st_ino

    def names(self) -> list[str]:
        """Names of everything in the folder, sorted."""
        try:
            return sorted(os.listdir(self.path))
        except OSError as error:
            raise CheckpointError(str(self.path), f"the folder cannot be listed: {error.strerror}") from error

    def below(self, name: str) -> Folder:
        """A folder inside this one.

        Raises:
            CheckpointError: the name is not plain, there is no such folder, or it is a link that leaves this one.
        """
        target = self._inside(name)
        if not target.is_dir():
            raise CheckpointError(name, "is not a folder" if target.exists() else "is missing")
        return Folder(target)

    def open(self, name: str) -> int:
        """Open a regular file for reading and return its descriptor, which the caller closes.

        Raises:
            CheckpointError: the name is not plain, there is no such file, it lies outside, or it is no regular file.
        """
        target = self._inside(name)
        try:
            # Without O_NONBLOCK, opening a pipe would wait for ever.
            fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise CheckpointError(name, "is missing") from None
        except OSError as error:
            advice = "; raise the limit of them (ulimit -Hn)" if error.errno == errno.EMFILE else ""
            raise CheckpointError(name, f"cannot be opened: {error.strerror}{advice}") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise CheckpointError(name, "is not a regular file")
        return fd

    def _inside(self, name: str) -> Path:
        """Where the plain ``name`` leads, which is inside this folder."""
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise CheckpointError(repr(name), "a checkpoint's file must be a plain name inside its folder")
        target = Path(os.path.realpath(self.path / name))
        if not any(target.is_relative_to(root) for root in self._roots):
            raise CheckpointError(name, "is a link that leaves the checkpoint's folder")
        return target

    def read_bytes(self, name: str, *, limit: int = MAX_JSON_BYTES) -> bytes:
        """The whole content of a small file."""
        fd = self.open(name)
        with os.fdopen(fd, "rb") as file:
            size = os.fstat(fd).st_size
            if size > limit:
                raise CheckpointError(name, f"has {size} bytes; at most {limit} are read")
            try:
                return file.read(limit)
            except OSError as error:
                raise CheckpointError(name, f"cannot be read: {error.strerror}") from error

    def read_text(self, name: str, *, limit: int = MAX_JSON_BYTES) -> str:
        """The whole content of a small UTF-8 file."""
        try:
            return self.read_bytes(name, limit=limit).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(name, f"is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from error

    def read_object(self, name: str) -> dict[str, Any]:
        """A JSON file whose top level is an object."""
        return parse_object(name, self.read_bytes(name))


class Renamed(Folder):
    """Some files of a folder under other names, and none of the others."""

    def __init__(self, folder: Path, names: Mapping[str, str]) -> None:
        """
        Args:
            names: of each file, the name it is asked for by and the one it has.
        """
        super().__init__(folder)
        self._names = dict(names)

    @property
    def renamed(self) -> Mapping[str, str]:
        """The names that files are asked for by, and those they have."""
        return MappingProxyType(self._names)

    def has(self, name: str) -> bool:
        return name in self._names and super().has(self._names[name])

    def names(self) -> list[str]:
        return sorted(name for name in self._names if self.has(name))

    def open(self, name: str) -> int:
        if name not in self._names:
            raise CheckpointError(name, "is missing")
        return super().open(self._names[name])


class Written(Folder):
    """Files that are on no disk, such as what a trainer builds by its own rules, as if they were alone in a folder."""

    def __init__(self, folder: Path, files: Mapping[str, bytes]) -> None:
        """
        Args:
            folder: that of the checkpoint they are for.
        """
        super().__init__(folder)
        self._files = dict(files)

    def has(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        return sorted(self._files)

    def open(self, name: str) -> int:
        if name not in self._files:
            raise CheckpointError(name, "is missing")
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(self._files[name])
        os.lseek(fd, 0, os.SEEK_SET)
        return fd


def refuse_pointer(file: str, begin: bytes) -> None:
    """Refuse what Git LFS puts in a file's place until it is fetched.

    Args:
        begin: the file's first bytes, 64 or more if it has so many.

    Raises:
        CheckpointError: it is that.
    """
    if begin.startswith(_POINTER):
        raise CheckpointError(file, "is what Git LFS puts in the file's place; `git lfs pull` there fetches the file")


def parse_object(file: str, data: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    A key given twice is an error, since readers differ on which one counts; so is text that is no Unicode, and nesting beyond
    ``MAX_JSON_DEPTH``: libraries that are handed the content recurse over it.
    """

    refuse_pointer(file, data)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise CheckpointError(file, f"key {twice!r} is given twice")
        return found

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(file, f"must hold a JSON object, not {type(value).__name__}")
    _check_depth(file, value)
    if _SURROGATE.search(data):
        _check_unicode(file, value)
    return value


def _check_depth(file: str, value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        inner = [item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer)]
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return
    raise CheckpointError(file, f"is nested more than {MAX_JSON_DEPTH} deep")


def _check_unicode(file: str, value: dict[str, Any]) -> None:
    """Halves of surrogate pairs, which JSON can spell and UTF-8 cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(
            file, f"has text that is no Unicode: half of a surrogate pair, {error.object[error.start]!a}"
        ) from error
