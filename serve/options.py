"""Every field of ``serve.config`` as an option: its flag, its environment variable, its place in a YAML file, its help."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import yaml

from configuration import Reader, Tree, keys_of
from serve.config import ServerConfig
from serve.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "TESSERA_"
FLAG_NAMES: Final = {"model.path": "model", "model.name": "model-name", "model.config": "model-config", "nodes.count": "nodes"}
"""Fields whose last part alone would not say enough; every other flag is that last part."""
READER: Final = Reader(ConfigError)
"""Reads for ``tessera-serve``."""


@dataclass(frozen=True, slots=True)
class Option:
    """One field of one section."""

    key: str
    """Dotted, as in messages: ``rpc.port``."""
    kind: type
    """``str``, ``int``, ``float`` or ``bool``."""
    default: object
    """``dataclasses.MISSING`` if the field must be given."""
    help: str
    choices: tuple[str, ...] = ()
    """The words that a ``str`` must be one of; empty if it may be any."""

    @property
    def section(self) -> str:
        """The section of the file that the option belongs to, such as ``rpc``."""
        return self.key.split(".")[0]

    @property
    def flag(self) -> str:
        """The argument that sets the option, such as ``--max-num-seqs``."""
        return "--" + FLAG_NAMES.get(self.key, self.key.split(".")[-1]).replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable that sets the option, such as ``TESSERA_MAX_NUM_SEQS``."""
        return ENVIRONMENT_PREFIX + self.flag[2:].replace("-", "_").upper()


@functools.cache
def all_options() -> tuple[Option, ...]:
    """Every field of every section, in the order of ``serve.config``."""
    options = []
    for key in keys_of(ServerConfig):
        if typing.get_origin(key.hint) is Literal:
            options.append(Option(key.name, str, key.default, key.meaning, typing.get_args(key.hint)))
            continue
        kinds = typing.get_args(key.hint) or (key.hint,)
        kind = next(kind for kind in kinds if kind is not types.NoneType)
        options.append(Option(key.name, kind, key.default, key.meaning))
    return tuple(options)


def build_config(path: str | None, given: Mapping[str, tuple[object, str]]) -> ServerConfig:
    """The configuration that a file, what is given beside it, and the defaults make.

    Args:
        path: of a YAML file laid out as ``to_yaml`` writes it.
        given: dotted key -> its value, and where it comes from.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, a value has the wrong type or breaks its rule, or a field
            without a default is missing.
    """
    tree = READER.read(Path(path)) if path else Tree()
    READER.lay(tree, given)
    for option in all_options():
        if option.default is dataclasses.MISSING and not tree.holds(option.key):
            raise ConfigError(f"{option.key} is missing: give {option.flag}, {option.variable}, or the key in --config")
    return READER.build(ServerConfig, tree)


def to_yaml(config: ServerConfig) -> str:
    """The whole configuration, as a file of ``--config`` holds it."""
    return str(yaml.dump(dataclasses.asdict(config), Dumper=yaml.SafeDumper, sort_keys=False, allow_unicode=True))
