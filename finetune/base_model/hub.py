"""Where a run's ``model`` and ``tokenizer.path`` are: folders, or models of the Hugging Face hub, as ``hf:ORG/NAME``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from checkpoint import CheckpointError
from checkpoint.readers.hub import HUB, Need, could_be_on_hub, find_on_hub
from finetune.config import TuneConfig
from finetune.errors import ConfigError
from finetune.output.folder import CHECKPOINTS, RESUME, step_folders


def on_hub(name: str | Path | None) -> bool:
    """Whether this names a model of the hub rather than a folder."""
    return name is not None and str(name).startswith(HUB)


def hint_for(name: str | Path) -> str:
    """What to add to a message about a folder that is not there, if its name could be one of the hub."""
    text = str(name)
    if on_hub(text) or not could_be_on_hub(text) or Path(text).expanduser().exists():
        return ""
    return f"; a model of the Hugging Face hub is named {HUB}{text}"


def folder_of(name: str | Path, key: str, need: Need = "model") -> Path:
    """The folder that ``name`` stands for: itself, or for a name of the hub its snapshot in the local cache.

    Args:
        key: the option or command that was given the name, for messages.

    Raises:
        ConfigError: the name is not there; says what was looked for, where, and how to get it.
    """
    if not on_hub(name):
        try:
            folder = Path(name).expanduser()
        except RuntimeError as error:  # of a user there is none of
            raise ConfigError(f"{key}: {name}: {error}") from error
        if hint := hint_for(name):
            raise ConfigError(f"{key}: {name}: there is no such folder{hint}")
        return folder
    if not could_be_on_hub(str(name).removeprefix(HUB)):
        raise ConfigError(f"{key} is {str(name)!r}; a model of the hub is named {HUB}ORG/NAME or {HUB}ORG/NAME@REVISION")
    try:
        return find_on_hub(str(name), need, fetch=True)
    except CheckpointError as error:
        raise ConfigError(f"{key}: {error}") from error


def _has_saves(config: TuneConfig) -> bool:
    """Whether a run goes on from something."""
    output = Path(config.run.output)
    return config.run.resume == "auto" and any(step_folders(output / root) for root in (RESUME, CHECKPOINTS))


def located(
    config: TuneConfig, say: Callable[[str], None] = lambda _: None, *, command: str = "tune", need: Need = "model"
) -> TuneConfig:
    """The configuration with folders in the place of names of the hub.

    Of a run that goes on a name is left as it is where the hub's snapshot is not to be had: its saves and data may do without.

    Args:
        say: told which folder a name of the hub is.
        need: what of ``model.path`` will be opened; less than the model where that is not trained.

    Raises:
        ConfigError: as ``folder_of``, or the model cannot be trained by ``command``.
    """

    def look(section: str, key: str, need: Need) -> None:
        nonlocal config
        part = getattr(config, section)
        name = getattr(part, key)
        try:
            folder = folder_of(name, f"{section}.{key}", need)
        except ConfigError as error:
            if not (on_hub(name) and can_do_without):
                raise
            say(str(error))
            return
        if on_hub(name):
            say(f"{name} is {folder}")
            config = replace(config, **{section: replace(part, **{key: str(folder)})})

    model, tokenizer = config.model, config.tokenizer
    # A resumed run may go on where the folder it began with is no more.
    is_open = config.run.resume == "auto" and not on_hub(model.path)
    can_do_without = need != "tokenizer" and _has_saves(config)
    if model.path is not None and not is_open:
        elsewhere = need == "tokenizer" and (tokenizer.path is not None or tokenizer.train is not None)
        look("model", "path", "config" if elsewhere else need)
    if tokenizer.path is not None and need != "config":
        look("tokenizer", "path", "tokenizer")
    if on_hub(model.base) and need != "tokenizer":
        look("model", "base", "model")
    if on_hub(model.adapter) and need != "tokenizer":
        look("model", "adapter", "adapter")
    config.check_command(command)
    return config
