"""Writes a checkpoint to a folder of its own, whole or not at all, however the writing ends."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from checkpoint import CheckpointError, CheckpointWriter, claimed
from finetune.errors import ConfigError, RunError


def require_new(out: Path) -> Path:
    """Where ``out`` leads, which holds nothing and has a folder above it that can be written to, made if absent.

    Raises:
        ConfigError: it does not.
    """
    try:
        out = out.expanduser().resolve()
        if out.is_symlink():  # a loop, which Python 3.13 leaves as it is
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out}: exists already; name a new folder")
        out.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{out}: no folder can be made there: {reason}") from error
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{out}: no folder can be made there: {out.parent} cannot be written to")
    return out


def write_new(out: Path, tensors: Iterable[tuple[str, torch.Tensor]], **settings: Any) -> Path:
    """Write a checkpoint to the folder ``out``, empty or absent; it appears whole or not at all.

    It is written in a hidden folder beside ``out``, ``.<name>.export``, and moved. What stays there of a process that was
    killed is removed by the next that writes to ``out``.

    Args:
        settings: of ``CheckpointWriter``.

    Raises:
        ConfigError: ``out`` holds something, or another process writes to it.
        RunError: writing failed.
    """
    out = require_new(out)
    try:
        with _workplace(out) as work:
            with CheckpointWriter(work, update_latest=False, **settings) as writer:
                for name, tensor in tensors:
                    writer.add(name, tensor)
                written = writer.commit()
            if out.is_dir():
                out.rmdir()  # empty, checked before
            written.rename(out)
            _flush(out.parent)
    except (OSError, CheckpointError) as error:
        raise RunError(f"{out}: could not be written: {error}") from error
    return out


@contextmanager
def _workplace(out: Path) -> Iterator[Path]:
    """The folder to write in, of this process alone, and empty; gone afterwards."""
    work = out.with_name(f".{out.name}.export")
    work.mkdir(exist_ok=True)
    with claimed(work) as free:
        if not free:
            raise ConfigError(f"{out}: another process is writing it")
        for left in work.glob("step-*"):
            shutil.rmtree(left)
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _flush(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
