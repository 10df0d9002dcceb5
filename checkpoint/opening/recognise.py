"""Which checkpoint a path means, and which reader its folder needs."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import NoReturn

from checkpoint.disk.folder import Folder
from checkpoint.disk.latest import LATEST, is_root, resolve_latest
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
_TITANS, _TITANS_STEP = "checkpoint", re.compile(r"step-(\d+)")
"""The folder that torchtitan keeps its steps in, and what it calls them."""
_SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")
_NUMBERED = re.compile(r"(?:checkpoint|step|epoch)[-_](\d+)")


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
    except ValueError as error:  # a zero in the name
        raise CheckpointError(repr(str(path)), f"is no path: {error}") from error
    except OSError as error:
        gone = error.errno in (errno.ENOENT, errno.ENOTDIR)
        raise CheckpointError(
            str(path), "there is no such folder" if gone else f"cannot be opened: {error.strerror}"
        ) from error
    if not path.is_dir():
        if path.suffix == ".ckpt":
            rule = "is a file of PyTorch Lightning's, which is not read; write its model with save_pretrained"
            raise CheckpointError(str(path), f"{rule}, and name that folder")
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
        return folder.below(_later_in_safetensors(folder, name) if layout is distcp else name)
    newest = _newest_of_trainer(folder)
    if newest is None and (folder.path / _TITANS).is_dir():
        return _newest_of_trainer(folder.below(_TITANS))
    return newest


def _later_in_safetensors(folder: Folder, name: str) -> str:
    """The step that torchtitan kept in safetensors at last, where it is whole and later than its step ``name``; else that."""
    own = _TITANS_STEP.fullmatch(name)
    steps = {int(match[1]): match[0] for match in map(_TITANS_STEP.fullmatch, folder.names()) if match}
    later = sorted((step for step in steps if own and step > int(own[1])), reverse=True)
    whole = (steps[step] for step in later if (folder.path / steps[step]).is_dir() and _is_whole(folder.below(steps[step])))
    return next(whole, name)


def _is_whole(folder: Folder) -> bool:
    """Whether there is a model in one safetensors file, in all of several, or in the parts that ranks wrote."""
    names = folder.names()
    shards = [match for match in map(_SHARD.fullmatch, names) if match]
    all_there = bool(shards) and len(shards) == int(shards[0][1])
    return "model.safetensors" in names or all_there or dcp_hf.newest_below(folder) is not None


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
    folders = [name for name in names if (folder.path / name).is_dir()][:_NAMED_AT_MOST]
    inside = [name for name in folders if _leads_on(folder, name)]
    hint = f"; {' and '.join(inside)} in it may be meant" if inside else ""
    raise CheckpointError(str(path), f"{where}{found}, which is no checkpoint of a known layout{hint}. Known are: {known}")


def _leads_on(folder: Folder, name: str) -> bool:
    """Whether the folder inside looks like a checkpoint, be it an unfinished one, or has one that a trainer numbered."""
    try:
        inner = folder.below(name)
        numbered = any(step_in_name(inner.path / each) is not None for each in inner.names())
        return numbered or inner.has(LATEST) or any(layout.recognises(inner) for layout in FORMATS)
    except CheckpointError:
        return False
