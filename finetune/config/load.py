"""A run's file, with the options of the command line on top, becomes a ``TuneConfig``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from finetune.config import TuneConfig
from finetune.config.read import apply_overrides, build, read_yaml
from finetune.errors import ConfigError


def load_config(path: Path, overrides: Sequence[tuple[str, str]] = (), *, command: str = "tune") -> TuneConfig:
    """Read the YAML file of a run of ``command``, with ``overrides`` on top.

    Raises:
        ConfigError: names the file and line, or the option, the key and the rule.
    """
    tree, places = read_yaml(path)
    apply_overrides(tree, places, overrides)
    if command == "pretrain" and isinstance(tree.setdefault("zero", {}), dict):
        tree["zero"].setdefault("stage", 1)
    try:
        config = build(TuneConfig, tree, places)
        config.check_command(command)
        return config
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if message.startswith((str(path), "command line")) else f"{path}: {message}") from None
