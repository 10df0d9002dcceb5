"""What a dataclass of settings can be told: every key with its type, default and meaning, for help texts and documents."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Key:
    """One field of a section."""

    name: str
    """Dotted, of a list's entries ``data.train[].weight``."""
    hint: Any
    """The field's type."""
    default: object
    """``dataclasses.MISSING`` if the key must be given."""
    meaning: str
    """The string below the field, on one line."""

    @property
    def shown_default(self) -> str:
        """The default as text, or that there is none."""
        return "required" if self.default is dataclasses.MISSING else str(self.default)


def keys_of(cls: type, prefix: str = "") -> Iterator[Key]:
    """Every key of the dataclass ``cls`` and of the sections in it, in their order.

    Args:
        prefix: of every name, with its dot.
    """
    hints = typing.get_type_hints(cls)
    meanings = _meanings(cls.__module__)[cls.__name__]
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        sections = [option for option in (*typing.get_args(hint), hint) if dataclasses.is_dataclass(option)]
        if sections:
            yield from keys_of(typing.cast("type", sections[0]), f"{prefix}{field.name}.")
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        yield Key(prefix + field.name, hint, default, meanings.get(field.name, ""))
        for entry in _entries(hint):
            yield from keys_of(entry, f"{prefix}{field.name}[].")


def _entries(hint: Any) -> list[type]:
    """The dataclass that entries of a list may be, when it is that."""
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
    return [typing.cast("type", option) for option in typing.get_args(inner) if dataclasses.is_dataclass(option)]


@functools.cache
def _meanings(module: str) -> dict[str, dict[str, str]]:
    """Class -> field -> the string that stands below it in the source, on one line."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        node.name: {
            field.target.id: " ".join(below.value.value.split())
            for field, below in itertools.pairwise(node.body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
