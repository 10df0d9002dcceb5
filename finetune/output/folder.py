"""Where a run keeps what: the names inside its folder, and which saves are in it."""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoint import claimed
from finetune.config import TuneConfig
from finetune.errors import ConfigError

CHECKPOINTS = "checkpoints"
"""Served checkpoints, one folder a save."""
RESUME = "resume"
"""Resume states, one folder a save."""
SNAPSHOTS = "snapshots"
"""Weights alone, one folder a snapshot; never removed."""
LOG = "log.jsonl"
_OF_A_MODEL = {"config.json": "model_type", "adapter_config.json": "peft_type"}
_STEP_FOLDER = re.compile(r"step-(\d{8,})")


def checkpoint_folder(path: Path) -> Path:
    """``path`` itself, or the checkpoints inside a run's folder."""
    return path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path


def run_of(path: Path) -> Path | None:
    """The folder of a run: ``path`` itself, or the one whose checkpoint, or folder of checkpoints, it is; ``None`` if none."""
    path = path.expanduser().resolve()
    roots = {CHECKPOINTS, SNAPSHOTS}
    run = path.parent if path.name in roots else path.parent.parent if path.parent.name in roots else path
    return run if (run / "config.yaml").is_file() else None


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """Committed saves under ``root``, oldest first."""
    if not root.is_dir():
        return []
    matches = ((_STEP_FOLDER.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def prune(written: Path, keep: int) -> list[Path]:
    """Remove all but the newest ``keep`` saves beside ``written``, the save of now, which always stays; 0 keeps all.

    Saves of later steps go too: the run went on from one before them, and they are no part of its course any more.

    Returns:
        Saves that would have gone, and that a server holds: they stay until the first call after it has ended.
    """
    if not keep:
        return []
    saves = step_folders(written.parent)
    number = next(step for step, folder in saves if folder.name == written.name)
    course = [folder for step, folder in saves if step <= number]
    held: list[Path] = []
    for folder in [*course[:-keep], *(folder for step, folder in saves if step > number)]:
        with claimed(folder) as free:
            if not free:
                held.append(folder)
                continue
            # Out of the way first: a removal that is cut short must not leave a half folder that looks like a save.
            doomed = folder.with_name(f"removed-{folder.name}")
            shutil.rmtree(doomed, ignore_errors=True)
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
    return held


@contextmanager
def claimed_output(config: TuneConfig) -> Iterator[Path]:
    """The folder of a run, made and held by this process alone.

    Raises:
        ConfigError: another process holds it, it holds another run, or it cannot be written.
    """
    output = Path(config.run.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = (output / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"run.output: {output} cannot be written: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"run.output: another process is training in {output}") from error
        _check_content(output, resuming=config.run.resume == "auto")
        yield output


def _says(file: Path, key: str) -> bool:
    """Whether a JSON file has that key somewhere; a run's own settings may be named as a model's."""
    try:
        return f'"{key}"' in file.read_text()
    except (OSError, ValueError):
        return False


def _check_content(output: Path, *, resuming: bool) -> None:
    """Nothing of an earlier run is overwritten by mistake, nothing starts over that was to go on, and a model that lies in the
    folder itself is not taken for the run's."""
    held = next((name for name, key in _OF_A_MODEL.items() if _says(output / name, key)), None)
    if held is not None and not step_folders(output / CHECKPOINTS) and not step_folders(output / RESUME):
        raise ConfigError(f"run.output: {output} holds a model ({held}); a run needs a folder without one, or a new one")
    if resuming and step_folders(output / CHECKPOINTS) and not step_folders(output / RESUME):
        from checkpoint import CheckpointError, resolve_latest  # slow, and seldom needed

        try:
            resolve_latest(output / CHECKPOINTS)  # weights alone: finetune.train.recovery goes on from them
        except CheckpointError as error:
            raise ConfigError(f"run.resume: {output} has no resume state, and {error}; name another run.output") from error
    if not resuming:
        if step_folders(output / CHECKPOINTS) or step_folders(output / RESUME):
            raise ConfigError(f"run.output: {output} holds a run; go on with it by --resume, or name another folder")
        (output / LOG).unlink(missing_ok=True)
