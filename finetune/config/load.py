"""A run's file, with the options of the command line on top, becomes a ``TuneConfig``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from configuration import Reader, Tree
from finetune.config import TuneConfig
from finetune.errors import ConfigError

_REPLACED: Final = {
    "pipeline.checkpoint_activations": "set activations.checkpoint, which pretrain obeys too: device for true, none for false"
}
READER: Final = Reader(ConfigError, _REPLACED)
"""Reads for ``tessera-finetune``."""


def load_config(path: Path, overrides: Sequence[tuple[str, str]] = (), *, command: str = "tune") -> TuneConfig:
    """Read the YAML file of a run of ``command``, with ``overrides`` on top.

    Raises:
        ConfigError: names the file and line, or the option, the key and the rule.
    """
    tree = read_tree(path, overrides)
    if command == "pretrain" and not tree.holds("zero.stage") and isinstance(tree.values.get("zero", {}), dict | None):
        tree.lay("zero.stage", 1, f"{path}")
    try:
        config = READER.build(TuneConfig, tree)
        config.check_command(command)
        return config
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if message.startswith((str(path), "command line")) else f"{path}: {message}") from None


def read_tree(path: Path, overrides: Sequence[tuple[str, str]] = ()) -> Tree:
    """The file as it is, with ``overrides`` on top.

    Raises:
        ConfigError: it cannot be read, or an override is no YAML.
    """
    tree = READER.read(path)
    READER.lay_over(tree, overrides)
    return tree
