"""A command's way from files and options to its dataclasses, with mistakes raised as that command's own error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

from configuration.convert import convert
from configuration.tree import Mistake, Tree, read_tree, read_value

T = TypeVar("T")
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class Reader:
    """Reads for one command; every method raises that command's error, whose message names place, key and rule.

    Args:
        error: raised for every mistake. What the dataclasses raise for a broken rule is one too, its message beginning with the
            key; where dataclasses stand in lists it is also a ``ValueError``, so that msgspec says which entry it was.
        replaced: keys of earlier releases -> what to write in their place. The files that those releases wrote hold every key:
            there ``false``, the default of all of these, means nothing.
    """

    def __init__(self, error: type[Exception], replaced: Mapping[str, str] = _NOTHING) -> None:
        self._error = error
        self._replaced = replaced

    def read(self, path: Path) -> Tree:
        """A YAML file that holds one mapping.

        Raises:
            the command's error: the file is missing, is not YAML, is not a mapping, or sets a key twice.
        """
        with self._told():
            return read_tree(path)

    def lay(self, tree: Tree, given: Mapping[str, tuple[object, str]]) -> None:
        """Write dotted keys, each with its value and where that comes from, over ``tree``.

        Raises:
            the command's error: what a key is below holds a value and no keys.
        """
        with self._told():
            for key, (value, place) in given.items():
                tree.lay(key, value, place)

    def lay_over(self, tree: Tree, overrides: Sequence[tuple[str, str]]) -> None:
        """Write each (dotted key, text), read as YAML, over ``tree``; the last one of a key wins.

        Raises:
            the command's error: a text is not YAML.
        """
        with self._told():
            for key, text in overrides:
                place = f"command line, --{key}"
                tree.lay(key, read_value(text, place), place)

    def build(self, cls: type[T], tree: Tree, prefix: str = "") -> T:
        """Make the dataclass ``cls`` of ``tree``, whose keys are named with ``prefix`` before them.

        Raises:
            the command's error: an unknown or missing key, a value of the wrong type, or a broken rule.
        """
        with self._told():
            return convert(tree, cls, error=self._error, replaced=self._replaced, prefix=prefix)

    def split(self, arguments: Sequence[str], top_level: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
        """Separate ``--key.sub value`` (also ``--key.sub=value``) from the other arguments.

        An option is an override when it holds a dot or names a top-level key.

        Raises:
            the command's error: an override has no value.
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
                    raise self._error(f"command line: --{name} needs a value")
                value = following
            overrides.append((name, value))
        return overrides, rest

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Mistake as mistake:
            raise self._error(str(mistake)) from None
