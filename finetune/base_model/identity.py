"""Which checkpoint ``model.path`` means: one folder, named absolutely, and known again by a hash wherever it lies later.

A root above step folders means another checkpoint after every save. So a run decides once, before its ranks start, and keeps
what it decided in its resume states and adapters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from checkpoint import Checkpoint, CheckpointError, Given, open_checkpoint
from checkpoint.disk.folder import Folder
from checkpoint.disk.latest import is_root, resolve_latest
from checkpoint.disk.manifest import load_manifest
from checkpoint.given import NOTHING_GIVEN, recorded_of, with_recorded
from checkpoint.model.config import GENERATION
from checkpoint.opening.adapted import BASE_SAID, pinned
from checkpoint.opening.identity import Identity, short
from checkpoint.opening.recognise import locate
from finetune.base_model.given import given_of
from finetune.base_model.hub import hint_for, on_hub
from finetune.config import TuneConfig
from finetune.errors import ConfigError
from finetune.output.folder import CHECKPOINTS, RESUME, checkpoint_folder, step_folders
from finetune.output.saves import newest_manifest, newest_whole

KEY = "base"
"""Where a manifest's ``extra`` has the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The checkpoint a run began with."""

    folder: str
    """Absolute, links resolved; it may have been moved since."""
    identity: str
    """What it is known by; see ``checkpoint.opening.identity``."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """What was said of how its files are read, as ``checkpoint.given.recorded_of`` has it."""
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """What its configuration says; empty in what releases before November 2026 recorded."""
    earlier: str | None = field(default=None, compare=False)
    """What earlier releases recorded in place of ``identity``."""

    def is_recorded_as(self, recorded: Base) -> bool:
        """Whether this, as it is, is what was recorded."""
        return not self.difference(recorded)

    def difference(self, recorded: Base) -> str:
        """In what this, as it is, is another than was recorded; empty where it is that one."""
        own = Identity(self.identity, self.earlier, self.configuration)
        return own.difference(recorded.identity, recorded.configuration)

    def __str__(self) -> str:
        said = "".join(f", {name} {value}" for name, value in self.given.items())
        return f"{self.folder} ({short(self.identity)}{said})"


def identified(checkpoint: Checkpoint) -> Base:
    """What is recorded of an open checkpoint.

    Raises:
        CheckpointError: a file of it cannot be read.
    """
    found, given = checkpoint.identity(), recorded_of(checkpoint.given)
    said = found.configuration or {}
    return Base(folder=str(checkpoint.path), identity=found.name, given=given, configuration=said, earlier=found.earlier)


def recorded_in(extra: Mapping[str, Any]) -> Base | None:
    """The base that a manifest remembers; ``None`` for those of releases that recorded none."""
    values = extra.get(KEY)
    if values is None:
        return None
    given, said = (dict(values.get(name, {})) for name in ("given", "configuration"))
    return Base(folder=str(values["folder"]), identity=str(values["identity"]), given=given, configuration=said)


def recorded(base: Base | None) -> dict[str, Any]:
    """``base`` as an entry of a manifest's ``extra``; nothing of a model that began new."""
    if base is None:
        return {}
    kept = {name: value for name, value in asdict(base).items() if value != {} and name != "earlier"}
    return {KEY: kept}


def recorded_beside(folder: Path) -> Base | None:
    """The base that the manifest of a save remembers; ``None`` without a manifest.

    Raises:
        CheckpointError: the manifest was changed.
    """
    manifest = load_manifest(Folder(folder))
    return None if manifest is None else recorded_in(manifest.extra)


def candidates(path: Path) -> list[Path]:
    """The checkpoints that ``path`` (a checkpoint, a folder of them, or a run) may mean: first what it means today.

    Other snapshots of a model in the cache of the Hugging Face hub are among them.

    Raises:
        CheckpointError: there is none.
    """
    try:
        root = checkpoint_folder(path.expanduser())
    except RuntimeError as error:  # of a user there is none of
        raise CheckpointError(str(path), str(error)) from error
    if not root.is_dir():
        raise CheckpointError(str(root), "is not a folder" if root.exists() else "there is no such folder")
    if not is_root(root):
        found = locate(root)
        snapshots = sorted(found.parent.iterdir()) if _in_hub_cache(found) else []
        return [found, *(folder for folder in snapshots if folder != found)]
    latest = resolve_latest(root).resolve()
    older = [folder.resolve() for _, folder in reversed(step_folders(root))]
    return [latest, *(folder for folder in older if folder != latest)]


def _in_hub_cache(folder: Path) -> bool:
    """Whether this is a snapshot in the cache of the hub; a run keeps a folder of that name too, with other weights in each."""
    root = folder.parent.parent
    return folder.parent.name == "snapshots" and (root.name.startswith("models--") or (root / "blobs").is_dir())


def kept_below(root: Path, wanted: Base) -> list[Path]:
    """Where ``wanted`` may be still in a folder in which another trainer keeps several of its saves."""
    names = (wanted.folder, root / Path(wanted.folder).name)
    inside = (Path(name).resolve() for name in names)
    return [path for path in dict.fromkeys(inside) if path.is_dir() and path.is_relative_to(root.resolve())]


def find_again(wanted: Base, places: list[Path], given: Given = NOTHING_GIVEN) -> Path | None:
    """The one of ``places`` that is ``wanted``; where it was is looked at first."""
    for folder in sorted(places, key=lambda place: place.name != Path(wanted.folder).name):
        try:
            with open_checkpoint(folder, given=given) as checkpoint:
                if identified(checkpoint).is_recorded_as(wanted):
                    return folder
        except CheckpointError:
            continue
    return None


def at_fault(config: TuneConfig, error: CheckpointError) -> ConfigError:
    """What is wrong with the model that a run begins with, by the key that names it."""
    for key in ("adapter", "base"):
        name = getattr(config.model, key)
        if name is not None and error.file in (name, BASE_SAID if key == "base" else ""):
            return ConfigError(f"model.{key}: {name}: {error.rule}")
    return ConfigError(f"model.path: {config.model.path}: {error}")


def settle_base(config: TuneConfig, say: Callable[[str], None]) -> TuneConfig:
    """``config`` with ``model.path`` the absolute folder of one checkpoint; a resumed run gets the one it began with.

    Args:
        say: told when that is not what ``model.path`` means today.

    Raises:
        ConfigError: there is no such model, or adapters would go on beside another one.
    """
    if config.model.path is None:
        return config
    save = newest_manifest(Path(config.run.output)) if config.run.resume == "auto" else None
    began_with = None if save is None else recorded_in(save.extra)
    try:
        places, problem = _places(config.model.path), ""
    except CheckpointError as error:
        if save is None:
            raise ConfigError(f"model.path: {config.model.path}: {error}{hint_for(config.model.path)}") from error
        places, problem = [], str(error)
    if began_with is not None:
        folder = _resumed(config, began_with, places, problem, say)
    else:
        folder = places[0] if places else _by_its_own(config, problem, say)
    if save is not None and began_with is None and config.lora is not None:
        say(f"model.path: the saves of {config.run.output} do not say what their base held; {folder} is taken for it, unproved")
    settled = replace(config, model=replace(config.model, path=str(folder)))
    try:
        given = pinned(folder, given_of(settled))
    except CheckpointError as error:
        if save is None or config.lora is not None:
            raise at_fault(config, error) from error
        own = _by_its_own(config, str(error), say)
        return replace(config, model=replace(config.model, path=str(own), base=None, adapter=None))
    return replace(settled, model=replace(settled.model, base=given.base, adapter=given.adapter))


def _places(given: str) -> list[Path]:
    if on_hub(given):  # ``located`` found no snapshot, and left it to what the run saved
        raise CheckpointError(given, "neither in the cache of the hub nor to be had from it")
    return candidates(Path(given))


def _resumed(config: TuneConfig, wanted: Base, places: list[Path], problem: str, say: Callable[[str], None]) -> Path:
    """The folder of the base a run began with, or one that does as well."""
    given = given_of(config)
    found = find_again(wanted, [*places, *kept_below(Path(os.path.expanduser(config.model.path or "")), wanted)], given)
    if found is not None and places:
        if found != places[0]:
            say(f"model.path: {config.model.path} means {places[0].name} by now; going on with {found}, this run's base")
        return found
    here = Path(wanted.folder)
    still_there = find_again(wanted, [here], given)
    if still_there is not None and not places:
        say(f"model.path: {problem}; going on with {here}, this run's base")
        return here
    if config.lora is not None:
        what = problem if not places else f"{places[0]} is another model"
        as_told = still_there or find_again(wanted, [here], with_recorded(given, wanted.given))
        where = f"it still is at {here}" if as_told else "it is there no more: put it back, or name its place"
        if here in places:
            what = difference_from(wanted, here, given)
            where = "it must be as it was"
        raise ConfigError(
            f"model.path: {config.model.path}: {what}; the adapters of this run were trained beside {wanted}, and {where}"
        )
    # All weights are in the resume state: of the base, only what describes it is asked for.
    if places:
        problem = _why_not_opened(places[0], given)
    if not problem:
        say(f"model.path: {places[0]} is not what this run began with, {wanted}; it goes on with the weights it saved")
        return places[0]
    return _by_its_own(config, problem, say)


def difference_from(wanted: Base, folder: Path, given: Given) -> str:
    """In what the checkpoint in a folder is another than ``wanted``."""
    try:
        with open_checkpoint(folder, given=given) as checkpoint:
            return identified(checkpoint).difference(wanted)
    except CheckpointError as error:
        return str(error)


def _why_not_opened(folder: Path, given: Given) -> str:
    """What is wrong with the model there, its adapter's base included; empty where nothing is."""
    try:
        open_checkpoint(folder, given=given).close()
    except CheckpointError as error:
        return str(error)
    return ""


def _by_its_own(config: TuneConfig, problem: str, say: Callable[[str], None]) -> Path:
    """The run's own newest save, a checkpoint if there is one: of a run that saves whole weights it describes the model."""
    saves = (newest_whole(Path(config.run.output) / root) for root in (CHECKPOINTS, RESUME))
    own = None if config.lora is not None else next((save for save in saves if save is not None), None)
    if own is None:
        raise ConfigError(f"model.path: {config.model.path}: {problem}{hint_for(str(config.model.path))}")
    say(f"model.path: {problem}; the run goes on without it, by what it saved itself: {own}")
    if not (own / GENERATION).is_file():  # resume states of earlier releases
        say(f"{own} holds no {GENERATION}: checkpoints from here on have that of a new model")
    return own.resolve()
