"""From a YAML file and dotted command-line options to frozen dataclasses, with every mistake named by its place."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from finetune.errors import ConfigError

T = TypeVar("T")
Places = dict[str, str]
"""Dotted key -> where it was set: ``run.yaml, line 3`` or ``command line``."""

_DEEPEST = 40
_REPLACED = {
    "pipeline.checkpoint_activations": "set activations.checkpoint, which pretrain obeys too: device for true, none for false"
}
"""Keys of earlier releases, and what to write in their place. The configuration files that they left in runs hold every key:
there ``false``, the default of all of these, means nothing."""


def read_yaml(path: Path) -> tuple[dict[str, Any], Places]:
    """Read one YAML mapping and remember the line of every key.

    Raises:
        ConfigError: the file is missing, is not YAML, is not a mapping, or names a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    loader = yaml.SafeLoader(text)
    places: Places = {}
    try:
        node = loader.get_single_node()
        value = {} if node is None else _construct(loader, node, "", places, path, 0)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    finally:
        loader.dispose()  # type: ignore[no-untyped-call]
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: the file must hold a mapping of keys to values")
    return value, places


def _construct(loader: yaml.SafeLoader, node: yaml.Node, prefix: str, places: Places, path: Path, depth: int) -> Any:
    if depth > _DEEPEST:
        raise ConfigError(f"{path}, line {node.start_mark.line + 1}: nested more than {_DEEPEST} levels deep")
    if isinstance(node, yaml.SequenceNode):
        return [
            _construct(loader, item, f"{prefix[:-1]}[{index}].", places, path, depth + 1)
            for index, item in enumerate(node.value)
        ]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)  # type: ignore[no-untyped-call]
    loader.flatten_mapping(node)
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node)  # type: ignore[no-untyped-call]
        place = f"{path}, line {key_node.start_mark.line + 1}"
        if not isinstance(key, str):
            raise ConfigError(f"{place}: key {key!r} is not text")
        if key in result:
            raise ConfigError(f"{place}: {prefix}{key} is set twice")
        places[prefix + key] = place
        result[key] = _construct(loader, value_node, f"{prefix}{key}.", places, path, depth + 1)
    return result


def split_overrides(arguments: Sequence[str], top_level: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Separate ``--key.sub value`` (also ``--key.sub=value``) from the other arguments.

    An option is an override when it holds a dot or names a top-level key.

    Raises:
        ConfigError: an override has no value.
    """
    overrides: list[tuple[str, str]] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word[2:].partition("=")
        if not word.startswith("--") or not ("." in name or name in top_level):
            rest.append(word)
            continue
        if not equals:
            following = next(words, None)
            if following is None:
                raise ConfigError(f"command line: --{name} needs a value")
            value = following
        overrides.append((name, value))
    return overrides, rest


def apply_overrides(tree: dict[str, Any], places: Places, overrides: Sequence[tuple[str, str]]) -> None:
    """Write each override, read as YAML, over ``tree``; the last one of a key wins."""
    for name, text in overrides:
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"command line: --{name} {text!r} is not a YAML value: {error}") from error
        *parents, last = name.split(".")
        here = tree
        for parent in parents:
            below = here.get(parent)
            if not isinstance(below, dict):
                below = here[parent] = {}
            here = below
        here[last] = value
        places[name] = f"command line, --{name}"


def build(cls: type[T], tree: Mapping[str, Any], places: Places, prefix: str = "") -> T:
    """Make the dataclass ``cls`` of ``tree``; every key must be a field and every value of its type.

    Raises:
        ConfigError: an unknown or missing key, a value of the wrong type, or a rule of ``cls`` broken.
    """
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in tree:
        if key not in fields and not (prefix + key in _REPLACED and tree[key] is False):
            raise ConfigError(_unknown_key(prefix + key, prefix, key, list(fields), places))
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in tree:
            values[name] = _convert(hints[name], tree[name], places, prefix + name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{name} is not set; it has no default")
    try:
        return cls(**values)
    except ConfigError as error:
        own = prefix if prefix.endswith("].") else ""  # an entry of a list does not know its own number
        raise ConfigError(_with_place(own + str(error), places)) from None


def _with_place(message: str, places: Places) -> str:
    key = message.split(" ", 1)[0]
    return f"{places[key]}: {message}" if key in places else message


def _unknown_key(dotted: str, prefix: str, key: str, allowed: list[str], places: Places) -> str:
    if dotted in _REPLACED:
        return f"{places.get(dotted, 'configuration')}: {dotted} is no longer a key: {_REPLACED[dotted]}"
    near = difflib.get_close_matches(key, allowed, n=1)
    hint = f"; did you mean {prefix}{near[0]}?" if near else ""
    owner = f"under {prefix[:-1]}" if prefix else "at the top"
    return f"{places.get(dotted, 'configuration')}: unknown key {dotted}{hint} (allowed {owner}: {', '.join(allowed)})"


def _convert(hint: Any, value: Any, places: Places, name: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if len(options) > 1:  # a word or a mapping
            options = [option for option in options if dataclasses.is_dataclass(option) == isinstance(value, Mapping)]
        return _convert(options[0], value, places, name)
    if origin is typing.Literal:
        choices = typing.get_args(hint)
        if isinstance(value, bool) and not isinstance(choices[0], bool):
            value = "on" if value else "off"
        if value not in choices:
            raise _wrong(name, value, f"be one of {', '.join(map(str, choices))}", places)
        return value
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise _wrong(name, value, "be a mapping of keys to values", places)
        return build(typing.cast("type[Any]", hint), value, places, f"{name}.")
    if origin is tuple:
        items = value if isinstance(value, list) else [value]
        inner = typing.get_args(hint)[0]
        return tuple(
            _convert(inner, item, places, f"{name}[{index}]" if isinstance(item, Mapping) else name)
            for index, item in enumerate(items)
        )
    if origin is not None:  # Mapping[str, Any]: passed on as it is, checked by the one who knows its keys
        if not isinstance(value, Mapping):
            raise _wrong(name, value, "be a mapping of keys to values", places)
        return dict(value)
    return _scalar(hint, value, places, name)


def _scalar(hint: type, value: Any, places: Places, name: str) -> Any:
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is float and not isinstance(value, bool):
        try:
            return float(value)  # also text: YAML 1.1 reads 1e-3, without a point, as text
        except (TypeError, ValueError):
            pass
    words = {bool: "be true or false", str: "be text", int: "be a whole number", float: "be a number"}
    raise _wrong(name, value, words[hint], places)


def _wrong(name: str, value: Any, rule: str, places: Places) -> ConfigError:
    place = places.get(name)
    return ConfigError(f"{place + ': ' if place else ''}{name} is {value!r}; it must {rule}")


def describe(cls: type, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, default, meaning) of every field, for ``--help`` and the documentation."""
    hints = typing.get_type_hints(cls)
    meanings = _field_docs(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        hint = hints[field.name]
        options = [option for option in (*typing.get_args(hint), hint) if dataclasses.is_dataclass(option)]
        if options:
            yield from describe(typing.cast("type", options[0]), f"{prefix}{field.name}.")
            continue
        default = "(required)" if field.default is dataclasses.MISSING else str(field.default)
        if field.default_factory is not dataclasses.MISSING:
            default = str(field.default_factory())
        yield prefix + field.name, default, meanings.get(field.name, "")
        for entry in _entries(hint):
            for name, entry_default, meaning in describe(entry):
                yield f"{prefix}{field.name}[].{name}", entry_default, meaning


def _entries(hint: Any) -> list[type]:
    """The dataclass that entries of a list may be, when it is that."""
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
    return [option for option in typing.get_args(inner) if dataclasses.is_dataclass(option)]


def _field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass, on one line."""
    body = typing.cast("ast.ClassDef", ast.parse(inspect.cleandoc(inspect.getsource(cls))).body[0]).body
    docs: dict[str, str] = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            text = ast.literal_eval(below.value)
            docs[field.target.id] = " ".join(text.split())
    return docs
