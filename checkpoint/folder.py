"""Opens the files of a checkpoint's folder, and none outside it."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint.errors import CheckpointError

MAX_JSON_BYTES = 256 << 20
"""The largest tokenizer known is near 40 MB; what is larger than this is not a checkpoint's JSON."""


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

    def open(self, name: str) -> int:
        """Open a regular file for reading and return its descriptor, which the caller closes.

        Raises:
            CheckpointError: the name is not plain, there is no such file, it lies outside, or it is no regular file.
        """
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise CheckpointError(repr(name), "a checkpoint's file must be a plain name inside its folder")
        target = Path(os.path.realpath(self.path / name))
        if not any(target.is_relative_to(root) for root in self._roots):
            raise CheckpointError(name, "is a link that leaves the checkpoint's folder")
        try:
            # Without O_NONBLOCK, opening a pipe would wait for ever.
            fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise CheckpointError(name, "is missing") from None
        except OSError as error:
            raise CheckpointError(name, f"cannot be opened: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise CheckpointError(name, "is not a regular file")
        return fd

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

    def read_object(self, name: str) -> dict[str, Any]:
        """A JSON file whose top level is an object."""
        return parse_object(name, self.read_bytes(name))


def parse_object(file: str, data: bytes) -> dict[str, Any]:
    """Parse a JSON object; a key given twice is an error, since readers differ on which one counts."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise CheckpointError(file, f"key {twice!r} is given twice")
        return found

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(file, f"must hold a JSON object, not {type(value).__name__}")
    return value


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a ``config.json`` that names no model type, wants to run code of its own, or is of quantised weights."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError("config.json", f"model_type is {model_type!r}; it must name the model's family")
    if "auto_map" in config:
        raise CheckpointError("config.json", "has auto_map, which names code to be run from the checkpoint; that is never done")
    if config.get("quantization_config") is not None:
        raise CheckpointError("config.json", "has quantization_config; quantised weights are not supported")
