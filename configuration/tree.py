"""A YAML file as a tree of plain values that knows where each of its keys was set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

_DEEPEST: Final = 40
_MOST_VALUES: Final = 30_000
"""Aliases of aliases make few lines many values."""
_BOOL, _TIMESTAMP = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp"


class Mistake(Exception):
    """Something in a file or an option is wrong; the message names place, key and rule."""


class Word(str):
    """``on``, ``off``, ``yes`` or ``no`` without quotes: text where text is asked for, a truth value where one is."""

    __slots__ = ()

    @property
    def truth(self) -> bool:
        return self.lower() in ("on", "yes")


@dataclass(slots=True)
class Tree:
    """Nested mappings and lists, and where each of their keys was set."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    """Dotted key, of a list's entry ``data.train[1].weight`` -> ``run.yaml, line 3`` or ``command line, --zero.stage``."""

    def lay(self, key: str, value: object, place: str) -> None:
        """Set the dotted ``key``, whatever it was before.

        Raises:
            Mistake: what it is below holds a value and no keys.
        """
        *parents, last = key.split(".")
        here, above = self.values, ""
        for parent in parents:
            above = f"{above}.{parent}" if above else parent
            below = here.get(parent)
            if below is None:
                below = here[parent] = {}
            if not isinstance(below, dict):
                before = f"{found}: " if (found := self.place_of(above)) else ""
                raise Mistake(f"{before}{above} is {below!r}; it must be a mapping of keys to values for {place} to set one")
            here = below
        here[last] = value
        for other in [other for other in self.places if other.startswith((f"{key}.", f"{key}["))]:
            del self.places[other]
        self.places[key] = place

    def holds(self, key: str) -> bool:
        """Whether the dotted ``key`` is set."""
        here: Any = self.values
        for part in key.split("."):
            if not isinstance(here, dict) or part not in here:
                return False
            here = here[part]
        return True

    def place_of(self, key: str) -> str | None:
        """Where ``key``, or the nearest thing that holds it, was set."""
        return next((self.places[name] for name in _outwards(key) if name in self.places), None)


def _outwards(key: str) -> Iterator[str]:
    """``a.b[1].c``, ``a.b[1]``, ``a.b``, ``a``."""
    while key:
        yield key
        key = key[: max(key.rfind("."), key.rfind("["), 0)]


class _Loader(yaml.SafeLoader):
    """YAML without its traps: only ``true`` and ``false`` are truth values for certain, and nothing is a date."""


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _truth(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> bool | Word:
    text = loader.construct_scalar(node)
    return text.lower() == "true" if text.lower() in ("true", "false") else Word(text)


_Loader.add_constructor(_BOOL, _truth)


def read_tree(path: Path) -> Tree:
    """Read a file that holds one YAML mapping; an empty one is an empty mapping.

    Raises:
        Mistake: it is missing, is not YAML, is not a mapping, or sets a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Mistake(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise Mistake(f"{path}: cannot be read: {error}") from None
    walk = _Walk(str(path))
    value = walk.document(text)
    if value is not None and not isinstance(value, dict):
        raise Mistake(f"{path}: the file must hold a mapping of keys to values")
    return Tree(value or {}, walk.places)


def read_value(text: str, place: str) -> Any:
    """The value that ``text`` is as YAML.

    Raises:
        Mistake: it is none.
    """
    try:
        return _Walk(place).document(text)
    except Mistake as error:
        raise Mistake(f"{place}: {text!r} is not a YAML value: {error}") from None


class _Walk:
    """From YAML's nodes, which know their lines, to plain values."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._count = 0
        self.places: dict[str, str] = {}

    def document(self, text: str) -> Any:
        try:
            loader = _Loader(text)
            try:
                node = loader.get_single_node()
                return None if node is None else self._value(loader, node, "", 0)
            finally:
                loader.dispose()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            said = ", ".join(part for part in (error.context, error.problem) if part)
            raise Mistake(f"{self._line(mark) if mark else self._source}: not valid YAML: {said}") from None
        except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
            # PyYAML lets what its constructors meet through: numbers of too many digits, bottomless nesting.
            raise Mistake(f"{self._source}: not valid YAML: {' '.join(str(error).split())}") from None

    def _line(self, mark: yaml.Mark) -> str:
        return f"{self._source}, line {mark.line + 1}"

    def _value(self, loader: _Loader, node: yaml.Node, key: str, depth: int) -> Any:
        self._count += 1
        if depth > _DEEPEST:
            raise Mistake(f"{self._line(node.start_mark)}: nested more than {_DEEPEST} levels deep")
        if self._count > _MOST_VALUES:
            raise Mistake(f"{self._line(node.start_mark)}: more than {_MOST_VALUES} values, those of aliases counted")
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.places[f"{key}[{index}]"] = self._line(item.start_mark)
            return [self._value(loader, item, f"{key}[{index}]", depth + 1) for index, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node)
        loader.flatten_mapping(node)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            name = loader.construct_object(key_node)
            place = self._line(key_node.start_mark)
            if not isinstance(name, str):
                raise Mistake(f"{place}: key {name!r} is not text")
            dotted = f"{key}.{name}" if key else str(name)
            if name in result:
                raise Mistake(f"{place}: {dotted} is set twice")
            self.places[dotted] = place
            result[str(name)] = self._value(loader, value_node, dotted, depth + 1)
        return result
