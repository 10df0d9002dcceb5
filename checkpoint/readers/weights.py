"""What a reader makes of a folder: its files, open, and where each tensor lies in them."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from checkpoint.disk.folder import Folder
from checkpoint.given import Given
from checkpoint.layout import Stored

_SPARE_FILES = 256
"""Files that a process opens beside its checkpoint: connections of callers, logs, devices."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights files of a folder, open, and where each tensor lies in them. Whoever holds this closes the files."""

    files: dict[str, int]
    """Descriptors by file name, or by the path to it below the folder."""
    places: dict[str, Stored]
    """Where each tensor lies, by its stored name."""
    table: str
    """The file that says which tensors there are: the index, or the only weights file."""
    config: Mapping[str, Any] | None = None
    """What the format itself says of the model, as a ``config.json`` would say it; ``None`` where it says nothing."""
    config_sought: str = ""
    """Where in the files that was looked for, for the message that it is not there; empty where a layout has no such place."""
    step: int | None = None
    """Optimizer steps taken, where the format says so."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else is known of the checkpoint, by words a user reads: world sizes, what is frozen, what is shared."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What an adapter makes another in the model's ``config.json``, wherever that was found."""
    adapter: Mapping[str, Any] | None = None
    """Its ``adapter_config.json``, where these tensors are an adapter alone and the base model is elsewhere."""
    tokenizer: Folder | None = None
    """Where the tokenizer's files are, of a layout that names them itself."""

    def beside(self, other: Weights) -> Weights:
        """These weights by names of files that ``other`` has for no file but the same, so that all can be held together."""
        names = {name: name if other.files.get(name, fd) == fd else f"adapter/{name}" for name, fd in self.files.items()}
        if all(new == old for old, new in names.items()):
            return self
        files = {names[name]: fd for name, fd in self.files.items()}
        places = {tensor: stored.moved(names) for tensor, stored in self.places.items()}
        return replace(self, files=files, places=places, table=names.get(self.table, self.table))

    def close(self) -> None:
        """Close the files."""
        for fd in self.files.values():
            os.close(fd)


class Format(Protocol):
    """One layout that checkpoints have on disk. A module of this package that has these is one."""

    NAME: str
    """What the layout is called by those who write it."""
    LOOKS_LIKE: str
    """What a folder of it has in it, for the message about one that is none of the known."""

    def recognises(self, folder: Folder) -> bool:
        """Whether this is one checkpoint of this layout, by the names of its files and small ones among them."""
        ...

    def newest_below(self, folder: Folder) -> str | None:
        """The name of the folder in ``folder`` that is the newest checkpoint of this layout; ``None`` where there is none.

        Raises:
            CheckpointError: the folder says which is the newest, and that is not there.
        """
        ...

    def open_weights(self, folder: Folder, given: Given) -> Weights:
        """Open every weights file and prove that tables and files agree, reading headers only.

        Raises:
            CheckpointError: whatever does not hold, by file and rule.
        """
        ...


def keep_room(fd: int) -> None:
    """Raise this process's limit of open files, as far as the system lets it, where few more would fit after ``fd``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or fd + _SPARE_FILES <= soft:
        return
    limit = fd + 2 * _SPARE_FILES if hard == resource.RLIM_INFINITY else min(hard, fd + 2 * _SPARE_FILES)
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class OpenFiles:
    """Files of one folder, opened once each; closed again by leaving the context with an error."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.descriptors: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        """The descriptor of ``name``, which may be a path below the folder."""
        if name not in self.descriptors:
            *below, last = name.split("/")
            folder = self._folder
            for part in below:
                folder = folder.below(part)
            self.descriptors[name] = folder.open(last)
            keep_room(self.descriptors[name])
        return self.descriptors[name]

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for fd in self.descriptors.values():
                os.close(fd)
