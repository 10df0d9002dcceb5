"""Which saves of a run are whole, and what their manifests say."""

from __future__ import annotations

from pathlib import Path

from checkpoint import CheckpointError, Manifest, resolve_latest
from checkpoint.disk.folder import Folder
from checkpoint.disk.manifest import check_sizes, load_manifest
from finetune.output.folder import CHECKPOINTS, RESUME, step_folders


def newest_whole(root: Path) -> Path | None:
    """The save under ``root`` that counts; ``None`` if none there is whole."""
    try:
        return resolve_latest(root)
    except CheckpointError:
        return None


def newest_first(root: Path) -> list[Path]:
    """The saves under ``root``: the one that counts, then all others, newest first; whole or not."""
    counts = newest_whole(root)
    others = [folder for _, folder in reversed(step_folders(root)) if folder != counts]
    return others if counts is None else [counts, *others]


def is_whole(folder: Path) -> bool:
    """Whether a save is there with all its files in their sizes."""
    try:
        manifest = load_manifest(Folder(folder))
        if manifest is None:
            return False
        check_sizes(Folder(folder), manifest)
    except CheckpointError:
        return False
    return True


def manifest_of(folder: Path) -> Manifest | None:
    """The manifest of a folder; ``None`` if it has none that holds."""
    try:
        return load_manifest(Folder(folder))
    except CheckpointError:
        return None


def newest_manifest(output: Path) -> Manifest | None:
    """The manifest of the newest whole save of a run, resume states first."""
    for root in (output / RESUME, output / CHECKPOINTS):
        folder = newest_whole(root)
        if folder is not None:
            return manifest_of(folder)
    return None
