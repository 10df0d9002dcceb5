"""From a tree of plain values to frozen dataclasses: msgspec checks types and builds, here its words become the project's."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeVar

import msgspec

from configuration.tree import Mistake, Tree, Word

T = TypeVar("T")

_TRUTHS: Final = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_NO_VALUE: Final = ("none", "null", "")
_RULES: Final = {bool: "be true or false", str: "be text", int: "be a whole number", float: "be a number"}
_MAPPING: Final = "be a mapping of keys to values"
_PATH: Final = re.compile(r" - at `(\$[^`]*)`$")


def convert(
    tree: Tree, cls: type[T], *, error: type[Exception], replaced: Mapping[str, str] | None = None, prefix: str = ""
) -> T:
    """Make the dataclass ``cls`` of ``tree``: every key must be a field, every value of its field's type.

    Beyond what msgspec takes: one value stands for a list of one, a number for text, text for the number or truth value it
    reads as (YAML 1.1 takes ``1e-3`` for text; options and the environment have nothing else), and ``none`` for no number.

    Args:
        error: what the rules of ``cls`` and of what it holds raise; their message begins with the key.
        replaced: keys of earlier releases -> what to write in their place; ``false`` is taken for their absence.
        prefix: of the keys in messages, with its dot.

    Raises:
        Mistake: an unknown or missing key, a value of the wrong type, or a broken rule; with the place, as far as one is known.
    """
    fitting = _Fitting(tree, replaced or {})
    fitted = fitting.section(cls, tree.values, prefix.removesuffix("."), "$")
    try:
        return msgspec.convert(fitted, cls)
    except msgspec.ValidationError as refused:
        found = _PATH.search(str(refused))
        path = found[1] if found else "$"
        if isinstance(refused.__cause__, error):
            # An entry of a list does not know its own number.
            owner = f"{fitting.wanted[path].key}." if path.endswith("]") else ""
            raise _placed(tree, owner + str(refused.__cause__)) from None
        key, value, rule = fitting.wanted[path]
        raise _placed(tree, f"{key} is {value!r}; it must {rule}") from None
    except error as broken:
        raise _placed(tree, str(broken)) from None


def _placed(tree: Tree, message: str) -> Mistake:
    place = tree.place_of(message.split(" ", 1)[0])
    return Mistake(f"{place}: {message}" if place else message)


class _Wanted(typing.NamedTuple):
    """What is to be said of one value if msgspec refuses it."""

    key: str
    value: object
    rule: str


class _Fitting:
    """Goes through a tree beside the types it is for."""

    def __init__(self, tree: Tree, replaced: Mapping[str, str]) -> None:
        self._tree = tree
        self._replaced = replaced
        self.wanted: dict[str, _Wanted] = {}
        """By msgspec's path."""

    def section(self, cls: type, value: object, key: str, path: str) -> object:
        """What msgspec makes ``cls`` of."""
        if value is None:  # a heading with nothing below it
            value = {}
        if not isinstance(value, Mapping):
            return value
        dot = f"{key}." if key else ""
        hints = typing.get_type_hints(cls)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in value:
            if name not in fields and not (dot + name in self._replaced and value[name] is False):
                raise self._unknown(dot, name, list(fields))
        for name, field in fields.items():
            if name not in value and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise _placed(self._tree, f"{dot}{name} is not set; it has no default")
        given = [name for name in fields if name in value]
        return {name: self._value(hints[name], value[name], dot + name, f"{path}.{name}") for name in given}

    def _unknown(self, dot: str, name: str, allowed: list[str]) -> Mistake:
        place = self._tree.place_of(dot + name)
        before = f"{place}: " if place else ""
        if dot + name in self._replaced:
            return Mistake(f"{before}{dot}{name} is no longer a key: {self._replaced[dot + name]}")
        near = difflib.get_close_matches(name, allowed, n=1)
        hint = f"; did you mean {dot}{near[0]}?" if near else ""
        owner = f"under {dot[:-1]}" if dot else "at the top"
        return Mistake(f"{before}unknown key {dot}{name}{hint} (allowed {owner}: {', '.join(allowed)})")

    def _value(self, hint: Any, value: Any, key: str, path: str, or_none: str = "") -> object:
        origin = typing.get_origin(hint)
        if origin in (typing.Union, types.UnionType):
            return self._one_of(typing.get_args(hint), value, key, path)
        if dataclasses.is_dataclass(hint):
            self.wanted[path] = _Wanted(key, value, _MAPPING)
            return self.section(typing.cast("type", hint), value, key, path)
        if origin is tuple:
            self.wanted[path] = _Wanted(key, value, "be a list")
            inner, items = typing.get_args(hint)[0], value if isinstance(value, list | tuple) else [value]
            return [
                self._value(inner, item, f"{key}[{index}]" if isinstance(item, Mapping) else key, f"{path}[{index}]")
                for index, item in enumerate(items)
            ]
        if origin is Literal:
            choices = typing.get_args(hint)
            self.wanted[path] = _Wanted(key, value, f"be one of {', '.join(map(str, choices))}")
            if isinstance(value, bool) and not isinstance(choices[0], bool):
                return "on" if value else "off"
            return str(value) if isinstance(value, Word) else value
        if origin is not None:  # Mapping[str, Any]: passed on as it is, checked by the one who knows its keys
            self.wanted[path] = _Wanted(key, value, _MAPPING)
            return _passed_on(value)
        self.wanted[path] = _Wanted(key, value, _RULES[hint] + (or_none if hint is not str else ""))
        return _scalar(hint, value)

    def _one_of(self, options: tuple[Any, ...], value: Any, key: str, path: str) -> object:
        """A field that may be absent, or one that is a word or a mapping."""
        some = [option for option in options if option is not type(None)]
        if value is None and len(some) < len(options):
            return None
        if len(some) > 1:
            some = [option for option in some if dataclasses.is_dataclass(option) == isinstance(value, Mapping)]
        may_miss = some[0] in (bool, int, float) and len(some) < len(options)
        if may_miss and isinstance(value, str) and value.lower() in _NO_VALUE:
            return None
        return self._value(some[0], value, key, path, " or none")


def _scalar(hint: type, value: Any) -> object:
    """``value`` as ``hint`` where it reads as one, else as it is, for msgspec to refuse."""
    if hint is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    if hint is bool and isinstance(value, str):
        return _TRUTHS.get(value.lower(), value)
    if hint in (int, float) and isinstance(value, str):
        try:
            return hint(value)
        except ValueError:
            return value
    return value


def _passed_on(value: Any) -> Any:
    """``on`` and ``off`` where nobody here knows what is asked for are YAML's truth values."""
    if isinstance(value, Word):
        return value.truth
    if isinstance(value, Mapping):
        return {key: _passed_on(item) for key, item in value.items()}
    return [_passed_on(item) for item in value] if isinstance(value, list) else value
