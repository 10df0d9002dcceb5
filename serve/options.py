"""Every field of ``serve.config`` as an option: its flag, its environment variable, its place in a YAML file, its help."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from serve import config as config_module
from serve.config import ServerConfig
from serve.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "TESSERA_"
FLAG_NAMES: Final = {"model.path": "model", "model.name": "model-name"}
"""Fields whose last part alone would not say enough; every other flag is that last part."""

TRUE_WORDS: Final = ("true", "yes", "on", "1")
FALSE_WORDS: Final = ("false", "no", "off", "0")
NONE_WORDS: Final = ("none", "null", "")


@dataclass(frozen=True, slots=True)
class Option:
    """One field of one section."""

    section: str
    name: str
    kind: type
    """``str``, ``int``, ``float`` or ``bool``."""
    optional: bool
    """Whether ``None`` is allowed."""
    default: object
    """``dataclasses.MISSING`` if the field must be given."""
    help: str

    @property
    def key(self) -> str:
        """Dotted, as in messages: ``rpc.port``."""
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        """``--max-num-seqs``."""
        return "--" + FLAG_NAMES.get(self.key, self.name).replace("_", "-")

    @property
    def variable(self) -> str:
        """``TESSERA_MAX_NUM_SEQS``."""
        return ENVIRONMENT_PREFIX + self.flag[2:].replace("-", "_").upper()

    def parse(self, value: object, source: str) -> object:
        """``value`` as this field's type.

        Args:
            value: text, or what YAML made of it.
            source: where it was found, for the message.

        Raises:
            ConfigError: it does not read as this type.
        """
        if self.optional and (value is None or (isinstance(value, str) and value.lower() in NONE_WORDS)):
            return None
        try:
            return _PARSERS[self.kind](value)
        except (ValueError, OverflowError):
            wanted = _KIND_NAMES[self.kind] + (" or none" if self.optional else "")
            raise ConfigError(f"{source}: {self.key} is {value!r}; it must be {wanted}") from None


def _parse_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in TRUE_WORDS + FALSE_WORDS:
        return value.lower() in TRUE_WORDS
    raise ValueError


def _parse_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    return int(value)


def _parse_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    return float(value)


def _parse_str(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    return str(value)


_PARSERS: Final[dict[type, typing.Callable[[object], object]]] = {
    bool: _parse_bool,
    int: _parse_int,
    float: _parse_float,
    str: _parse_str,
}
_KIND_NAMES: Final = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@functools.cache
def all_options() -> tuple[Option, ...]:
    """Every field of every section, in the order of ``serve.config``."""
    options = []
    for section, section_type in typing.get_type_hints(ServerConfig).items():
        hints = typing.get_type_hints(section_type)
        helps = _field_docstrings(section_type)
        for field in dataclasses.fields(section_type):
            kinds = _alternatives(hints[field.name])
            kind = next(kind for kind in kinds if kind is not types.NoneType)
            options.append(Option(section, field.name, kind, types.NoneType in kinds, field.default, helps.get(field.name, "")))
    return tuple(options)


def _alternatives(hint: Any) -> tuple[type, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _field_docstrings(section_type: type) -> dict[str, str]:
    """Field name -> the string that stands below it in the source, as one line."""
    tree = ast.parse(inspect.getsource(config_module))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == section_type.__name__)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def build_config(values: Mapping[str, object], origins: Mapping[str, str]) -> ServerConfig:
    """The configuration that ``values`` and the defaults make.

    Args:
        values: dotted key -> value of the field's type.
        origins: dotted key -> where the value came from, for the message of a rule it breaks.

    Raises:
        ConfigError: a value breaks its rule, or a field without a default is missing.
    """
    for option in all_options():
        if option.default is dataclasses.MISSING and option.key not in values:
            raise ConfigError(f"{option.key} is missing: give {option.flag}, {option.variable}, or the key in --config")
    sections = {}
    for section, section_type in typing.get_type_hints(ServerConfig).items():
        given = {o.name: values[o.key] for o in all_options() if o.section == section and o.key in values}
        try:
            sections[section] = section_type(**given)
        except ConfigError as error:
            origin = origins.get(str(error).split(" ", 1)[0])
            raise ConfigError(f"{origin}: {error}" if origin else str(error)) from None
    return ServerConfig(**sections)


def read_yaml(path: str) -> dict[str, object]:
    """Dotted key -> value, from a file laid out as ``to_yaml`` writes it.

    Raises:
        ConfigError: no such file, not YAML, or a key that is unknown or given twice.
    """
    try:
        with open(path, encoding="utf-8") as file:
            document = yaml.load(file, _Loader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        # PyYAML lets what its constructors meet through: impossible dates, numbers beyond all floats, bottomless nesting.
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from None
    by_key = {option.key: option for option in all_options()}
    sections = tuple(dict.fromkeys(option.section for option in all_options()))
    values: dict[str, object] = {}
    for section, body in _mapping(document, path, "the file").items():
        _require_known(section, sections, path, "section")
        names = tuple(option.name for option in all_options() if option.section == section)
        for name, value in _mapping(body, path, section).items():
            _require_known(name, names, path, f"key of {section}")
            values[f"{section}.{name}"] = by_key[f"{section}.{name}"].parse(value, path)
    return values


def _mapping(value: object, path: str, what: str) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {what} is {type(value).__name__}; it must be a mapping")
    return value


def _require_known(name: str, allowed: tuple[str, ...], path: str, what: str) -> None:
    if name not in allowed:
        raise ConfigError(f"{path}: unknown {what}: {name!r}; allowed: {', '.join(allowed)}")


def to_yaml(config: ServerConfig) -> str:
    """The whole configuration, as ``read_yaml`` reads it."""
    return str(yaml.dump(dataclasses.asdict(config), Dumper=yaml.SafeDumper, sort_keys=False, allow_unicode=True))


class _Loader(yaml.SafeLoader):
    """YAML without two of its traps: ``off`` is a word here, not ``false``, and a key may stand once only."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is not text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads on, off, yes and no as booleans; only true and false are, here.
_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool" or letter in "tTfF"]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
