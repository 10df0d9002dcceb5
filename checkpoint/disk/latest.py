"""Finds the newest whole checkpoint under a root that a run writes to."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

from checkpoint.disk.folder import Folder
from checkpoint.disk.manifest import MANIFEST, check_sizes, load_manifest
from checkpoint.errors import CheckpointError

LATEST = "latest"
"""A text file with the name of the step folder that counts."""

_STEP = re.compile(r"step-(\d{8,})(\.old-[0-9a-f]+)?")
MAX_LATEST_BYTES = 4096
_log = logging.getLogger(__name__)
_told: dict[Path, str] = {}
"""What was last said of a root: whoever follows one looks at it again and again."""


def step_folder_name(step: int) -> str:
    """``step-00000012`` for 12; sorts by step up to 99,999,999."""
    return f"step-{step:08d}"


def resolve_latest(root: str | Path) -> Path:
    """The folder that ``<root>/latest`` names; if that is not there or not whole, the newest step folder that is.

    Whole means that the manifest holds and every file has its size.

    Raises:
        CheckpointError: there is no whole checkpoint under this root.
    """
    root = Path(root)
    reasons: list[str] = []
    for folder in _candidates(root, reasons):
        try:
            _check_whole(folder)
        except CheckpointError as error:
            reasons.append(f"{folder.name}: {error}")
            continue
        told = f"using {folder.name}, since {'; '.join(reasons)}" if reasons else ""
        if told and told != _told.get(root):
            _log.warning("%s", told)
        _told[root] = told
        return folder
    raise CheckpointError(str(root), "holds no whole checkpoint" + (f" ({'; '.join(reasons)})" if reasons else ""))


def is_root(path: Path) -> bool:
    """Whether this folder looks like one that holds step folders rather than like a checkpoint."""
    return not (path / "config.json").exists() and (bool(_steps(path)) or _names_step(path))


def _names_step(root: Path) -> bool:
    """Whether ``latest`` is one of Tessera's: DeepSpeed keeps a file of that name above its saves, too."""
    if not (root / LATEST).exists():
        return False
    try:
        return _STEP.fullmatch(_latest(root)) is not None
    except (CheckpointError, UnicodeDecodeError):
        return True  # which ``resolve_latest`` tells


def _latest(root: Path) -> str:
    """What ``latest`` names."""
    return Folder(root).read_bytes(LATEST, limit=MAX_LATEST_BYTES).decode("utf-8").strip()


def named_below(folder: Folder, recognises: Callable[[Folder], bool]) -> str | None:
    """What ``latest`` in a trainer's folder names, where that is a checkpoint of the layout that ``recognises`` knows."""
    if not folder.has(LATEST):
        return None
    try:
        name = folder.read_text(LATEST, limit=MAX_LATEST_BYTES).strip()
        return name if recognises(folder.below(name)) else None
    except CheckpointError:
        return None  # another layout's, or of none


def _candidates(root: Path, reasons: list[str]) -> list[Path]:
    """What ``latest`` names, then the step folders, newest first."""
    steps = _steps(root)
    if not (root / LATEST).exists():
        return steps
    try:
        name = _latest(root)
    except (CheckpointError, UnicodeDecodeError) as error:
        reasons.append(f"{LATEST} cannot be read: {error}")
        return steps
    named = root / name if _STEP.fullmatch(name) else None
    if named is None or not named.is_dir():
        reasons.append(f"{LATEST} names {name!r}, which is not a step folder here")
        return steps
    return [named, *(folder for folder in steps if folder != named)]


def _steps(root: Path) -> list[Path]:
    """Step folders, newest first. One set aside while it was being replaced comes after the one that took its place."""
    found: list[tuple[int, bool, Path]] = []
    try:
        for path in root.iterdir():
            match = _STEP.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), match[2] is None, path))
    except OSError as error:
        raise CheckpointError(str(root), f"the folder cannot be listed: {error.strerror}") from error
    return [path for _, _, path in sorted(found, reverse=True)]


def _check_whole(path: Path) -> None:
    folder = Folder(path)
    manifest = load_manifest(folder)
    if manifest is None:
        raise CheckpointError(MANIFEST, "is missing")
    check_sizes(folder, manifest)
