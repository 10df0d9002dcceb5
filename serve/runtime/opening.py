"""What the options mean by a model: its folders, the newest checkpoint there, held and proved before it is served."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from pathlib import Path

from checkpoint import CheckpointError, hold, locate, open_structure, pinned
from checkpoint.disk.manifest import MANIFEST
from checkpoint.opening.adapted import BASE_SAID
from checkpoint.opening.identity import check_base
from checkpoint.opening.structure import CODE
from checkpoint.readers.hub import HUB, find_on_hub
from checkpoint.text.tokenizer import Tokenizer
from serve.config import ModelConfig, ServerConfig
from serve.errors import ConfigError
from serve.model.fit import check_fit, check_rows, given_of
from serve.runtime.edition import Edition
from serve.runtime.watch import Sight
from serve.text.tokenizer import load_tokenizer, tokenizer_digest

_log = logging.getLogger(__name__)


def see(config: ServerConfig) -> Sight | None:
    """The newest checkpoint that the options mean, of its base and adapter too; ``None`` where there is none at this moment."""
    try:
        places = places_of(with_checkpoint_folder(config).model)
        files = sorted((file, file.stat()) for place in places for file in Path(place).rglob("*") if file.is_file())
    except (ConfigError, CheckpointError, OSError) as error:
        _log.debug("nothing to follow at this moment: %s", error)
        return None
    mark = "".join(f"{name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}\n" for name, stat in files)
    return Sight(places, mark, all((Path(place) / MANIFEST).is_file() for place in places))


def places_of(model: ModelConfig) -> tuple[str, ...]:
    """The folders that a model is made of: its own, and those of an adapter's base or of the adapter that is added."""
    return tuple(dict.fromkeys(filter(None, (model.path, model.base, model.adapter))))


def open_edition(config: ServerConfig) -> Edition:
    """What the model's folder holds now, held there with an adapter's base, proved as far as headers, sizes, configuration
    and tokenizer tell: without torch, so that a folder or an option at fault is told of at once.

    Raises:
        ConfigError: there is no such folder, no whole checkpoint in it, or it cannot be served with these options.
    """
    found = with_checkpoint_folder(config)
    try:
        with contextlib.ExitStack() as stack:
            held = []
            for place in places_of(found.model):
                held.append(hold(Path(place)))
                stack.callback(held[-1].release)
            tokenizer, digest = _proved(found)
            stack.pop_all()
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    for one in held:
        if not one.locked:
            _log.info("the file system of %s has no locks: nothing keeps a training run from removing it", one.path)
    written = filter(None, (_written_seconds(Path(place)) for place in places_of(found.model)))
    return Edition(found, tokenizer, tuple(held), digest, max(written, default=None))


def _written_seconds(folder: Path) -> float | None:
    """When a checkpoint was written: its manifest is last; another trainer's newest file where there is none."""
    manifest = folder / MANIFEST
    try:
        files = [manifest] if manifest.is_file() else [file for file in folder.iterdir() if file.is_file()]
        return max((file.stat().st_mtime for file in files), default=None)
    except OSError:
        return None


def _proved(config: ServerConfig) -> tuple[Tokenizer | None, str]:
    """The tokenizer of a folder whose structure and tokenizer are sound and fit each other and the options; and its digest."""
    with open_structure(config.model.path, given=given_of(config.model)) as structure:
        check_fit(config.model, structure)
        check_base(structure, given_of(config.model))
        if CODE in structure.weights.facts:
            _log.info("%s: there is %s: %s is served without it", config.model.path, CODE, structure.config["model_type"])
        tokenizer = load_tokenizer(structure.tokenizer)
        if tokenizer is not None:
            check_rows(structure, tokenizer.largest_id)
        elif (named := structure.weights.facts.get("vocab_file")) is not None:
            _log.warning(
                "%s was trained with the tokenizer %s, which is neither beside nor above it: only token ids are served; "
                "--tokenizer gives it",
                config.model.path,
                named,
            )
        return tokenizer, tokenizer_digest(structure.tokenizer)


def with_checkpoint_folder(config: ServerConfig) -> ServerConfig:
    """The configuration with the folder that is served until the next reload: a run that writes its next checkpoint meanwhile
    changes neither the tokenizer nor what a restarted rank loads.

    Raises:
        ConfigError: there is no such folder, or no whole checkpoint in it.
    """
    folder = Path(config.model.path)
    on_hub = config.model.path.startswith(HUB) and not folder.exists()
    if not on_hub and not folder.is_dir():
        rule = "be a folder" if folder.exists() else "exist"
        raise ConfigError(f"model.path is {config.model.path!r}; it must {rule}")
    try:
        if on_hub:
            folder = find_on_hub(config.model.path, fetch=False)
        # Links are followed now: one that is turned elsewhere later changes nothing until the next reload either.
        folder = locate(folder)
        given = pinned(folder, given_of(config.model))
    except CheckpointError as error:
        of = {BASE_SAID: "base", config.model.base: "base", config.model.adapter: "adapter"}
        raise ConfigError(f"model.{of.get(error.file, 'path')}: {error}") from error
    name, base, adapter = config.model.served_name, given.base or "", given.adapter or ""
    model = dataclasses.replace(config.model, path=str(folder), name=name, base=base, adapter=adapter)
    return dataclasses.replace(config, model=model)
