"""Which checkpoint a path means, and which reader its folder needs."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import NoReturn

from checkpoint.disk.folder import Folder
from checkpoint.disk.latest import is_root, resolve_latest
from checkpoint.disk.step_names import step_in_name
from checkpoint.errors import CheckpointError
from checkpoint.readers import hf, peft
from checkpoint.readers.dcp import distcp
from checkpoint.readers.dcp import hf as dcp_hf
from checkpoint.readers.deepspeed import autotp, layers, universal, zero3, zero12
from checkpoint.readers.megatron import deepspeed as megatron_deepspeed
from checkpoint.readers.megatron import dist as megatron_dist
from checkpoint.readers.megatron import folders as megatron
from checkpoint.readers.neox import folders as neox
from checkpoint.readers.weights import Format

FORMATS: tuple[Format, ...] = (
    *(peft, hf, distcp, dcp_hf, neox, megatron, megatron_dist, megatron_deepspeed),
    *(zero3, zero12, autotp, layers, universal),
)
"""Every layout that is read, in the order in which a folder is asked about them."""

MASTERS_READ: tuple[Format, ...] = (zero3, zero12, universal)
"""The layouts of which the optimizer's master weights are read: always, or where they are asked for."""

RUN_CHECKPOINTS = "checkpoints"
"""Where a run's folder keeps its checkpoints."""

_DEEPEST = 4
"""Folders that a path may be above its checkpoint: run, kept checkpoints, step, the trainer's own folder."""
_NAMED_AT_MOST = 12
_NUMBERED = re.compile(r"(?:checkpoint|step)[-_](\d+)")


def recognise(path: str | Path) -> tuple[Folder, Format]:
    """The folder of the checkpoint that ``path`` means, links resolved, and the layout it has.

    Args:
        path: a checkpoint's folder, or one above: a run, the root above step folders, whatever a trainer keeps its newest in.

    Raises:
        CheckpointError: there is no such folder, or it holds no checkpoint of a known layout; it says what the folder holds.
    """
    folder = _existing(Path(path))
    for _ in range(_DEEPEST):
        for layout in FORMATS:
            if layout.recognises(folder):
                return folder, layout
        inner = _inner(folder)
        if inner is None and folder.has("config.json"):
            return folder, hf  # which says that the weights are missing
        if inner is None:
            _refuse(path, folder)
        folder = inner
    raise CheckpointError(str(path), f"leads {_DEEPEST} folders down, to {folder.path}, and not to a checkpoint")


def locate(path: str | Path) -> Path:
    """The folder of the checkpoint that ``path`` means, links resolved: ``path`` itself, or what it keeps as its newest.

    Raises:
        CheckpointError: there is no such folder, or it holds no checkpoint of a known layout.
    """
    return recognise(path)[0].path


def _existing(path: Path) -> Folder:
    try:
        os.stat(path)
    except OSError as error:
        gone = error.errno in (errno.ENOENT, errno.ENOTDIR)
        raise CheckpointError(
            str(path), "there is no such folder" if gone else f"cannot be opened: {error.strerror}"
        ) from error
    if not path.is_dir():
        raise CheckpointError(str(path), "is not a folder; name the one that it is in")
    return Folder(path)


def _inner(folder: Folder) -> Folder | None:
    """The folder inside this one that its newest checkpoint is in."""
    if is_root(folder.path):
        return Folder(resolve_latest(folder.path))
    if (folder.path / RUN_CHECKPOINTS).is_dir():
        return folder.below(RUN_CHECKPOINTS)
    for layout in FORMATS:
        name = layout.newest_below(folder)
        if name is None:
            continue
        inner = folder.below(name)
        # torchtitan's last step may be in safetensors, beside those before.
        last = _newest_of_trainer(folder) if layout is distcp else None
        is_later = last is not None and (step_in_name(last.path) or 0) > (step_in_name(inner.path) or 0)
        return last if is_later else inner
    return _newest_of_trainer(folder)


def _newest_of_trainer(folder: Folder) -> Folder | None:
    """The folder with the highest number, as trainers of Hugging Face's libraries and torchtitan give, that has a model or an
    adapter in their files."""
    numbered = [(int(match[1]), name) for name in folder.names() if (match := _NUMBERED.fullmatch(name))]
    safetensors = (hf.recognises, peft.recognises, dcp_hf.recognises, lambda inner: dcp_hf.newest_below(inner) is not None)
    for _, name in sorted(numbered, reverse=True):
        if (folder.path / name).is_dir():
            inner = folder.below(name)
            if any(recognised(inner) for recognised in safetensors):
                return inner
    return None


def _refuse(path: str | Path, folder: Folder) -> NoReturn:
    """Say what a folder that no reader knows looks like, and what would be known."""
    names = folder.names()
    listed = ", ".join(names[:_NAMED_AT_MOST]) + (
        f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    )
    found = f"holds {listed}" if names else "is empty"
    known = "; ".join(f"{layout.NAME} ({layout.LOOKS_LIKE})" for layout in FORMATS)
    where = "" if folder.path == Path(path).resolve() else f"leads to {folder.path}, which "
    inside = [name for name in names[:_NAMED_AT_MOST] if (folder.path / name).is_dir() and _leads_on(folder.below(name))]
    hint = f"; {' and '.join(inside)} in it may be meant" if inside else ""
    raise CheckpointError(str(path), f"{where}{found}, which is no checkpoint of a known layout{hint}. Known are: {known}")


def _leads_on(folder: Folder) -> bool:
    """Whether the folder has files of a checkpoint, be it an unfinished one, or a folder with one."""
    try:
        return any(layout.recognises(folder) for layout in FORMATS) or _inner(folder) is not None
    except CheckpointError:
        return True  # which its own message is about
