"""Where a run keeps what: the names inside its folder, and which saves are in it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

CHECKPOINTS = "checkpoints"
"""Served checkpoints, one folder a save."""
RESUME = "resume"
"""Resume states, one folder a save."""
LOG = "log.jsonl"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")


def checkpoint_folder(path: Path) -> Path:
    """``path`` itself, or the checkpoints inside a run's folder."""
    return path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """Committed saves under ``root``, oldest first."""
    if not root.is_dir():
        return []
    matches = ((_STEP_FOLDER.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` saves; 0 keeps all."""
    for _, folder in step_folders(root)[:-keep] if keep else []:
        # Out of the way first: a removal that is cut short must not leave a half folder that looks like a save.
        doomed = folder.with_name(f"removed-{folder.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
