"""What pickles yield in place of objects, and the bounds that keep it small to walk, to compare and to show."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NoReturn

MAX_DEPTH = 128
"""Levels of nesting; checkpoints have about ten."""
_MAX_KEY = 1 << 63


class Refused(Exception):
    """A rule of the table's content is broken."""


class Bag:
    """An object of a class that is not made: what the pickle would have made it of, and nothing that runs."""

    CLASS: ClassVar[str] = ""
    """Module and name of the class that the pickle names."""

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Bag:
        made = object.__new__(cls)
        object.__setattr__(made, "args", args)
        object.__setattr__(made, "state", None)
        return made

    def __setstate__(self, state: object) -> None:
        object.__setattr__(self, "state", state)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise pickle.UnpicklingError("the pickle tries to change what stands in for an object")

    def __repr__(self) -> str:
        return f"<{self.CLASS}>"


class Table(dict[Any, Any]):
    """Stands in for every dictionary of a pickle; drops the attributes (``_metadata``) that modules hang on one.

    A key is given once, since readers differ on which one counts; and none is of a kind that takes long to hash.
    """

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) is tuple and any(isinstance(item, tuple) for item in key):
            raise Refused("the pickle has a tuple of tuples as a key")
        if type(key) is int and not -_MAX_KEY <= key < _MAX_KEY:
            raise Refused("the pickle has a number beyond 2^63 as a key")
        if key in self:
            raise Refused(f"the key {key!r} is given twice")
        super().__setitem__(key, value)

    def __setstate__(self, state: object) -> None:
        pass


_PLAIN = frozenset((str, int, float, bool, type(None), bytes, type))


def check_bounded(root: object, leaves: Iterable[type], most: int) -> None:
    """A tree does not hold itself, is not very deep, and is not very large when written out: a few bytes that refer to one
    another make one that takes for ever to show, to compare or to walk.

    Args:
        leaves: types of tuples that hold plain values alone.
        most: values, of which one that is referred to several times counts each time.

    Raises:
        Refused: it is.
    """
    plain = _PLAIN.union(leaves)
    known: dict[int, tuple[int, int]] = {}

    def measured(value: object, above: int) -> tuple[int, int]:
        """Values when written out, and levels of nesting."""
        inner = _inside(value)
        count, levels = 1 + len(inner), 0
        for item in inner:
            if type(item) in plain:
                continue
            size = known.get(id(item))
            if size is None:
                if above >= MAX_DEPTH:
                    raise Refused(f"the pickle has values in values more than {MAX_DEPTH} deep, or one that holds itself")
                size = known[id(item)] = measured(item, above + 1)
            count += size[0]
            levels = max(levels, size[1])
        if levels >= MAX_DEPTH:
            raise Refused(f"the pickle has values in values more than {MAX_DEPTH} deep")
        if count > most:
            raise Refused(f"the pickle has more than {most} values when what is shared is written out")
        return count, levels + 1

    measured(root, 0)


def _inside(value: object) -> Sequence[Any]:
    if isinstance(value, Bag):
        return value.args if value.state is None else (*value.args, value.state)
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list | tuple) else ()
