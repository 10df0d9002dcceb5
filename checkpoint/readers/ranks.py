"""The tensors of a model as tensor-parallel ranks keep them, and how they are put together again.

Nothing is read: a part is a stretch of a file, and what is put together is a ``Stored``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

from checkpoint.errors import CheckpointError
from checkpoint.layout import Extent, Piece, Stored, copies, joined, whole
from checkpoint.readers.files.pickles import DTYPES, StoredTensor
from checkpoint.readers.files.torch_zip import Archive

Part = tuple[str, Extent]
"""A file, and where in it a tensor or some rows of one lie."""
Made = TypeVar("Made")
_FLOATS: Final = {dtype: name for name, dtype in DTYPES.items() if "float" in name}
"""torch's names of the dtypes that models are of, by the format's."""


def tensors_of(archive: Archive, file: str, table: object, *, without: str = "") -> dict[str, Part]:
    """The tensors of a table that an archive holds, each proved to lie in its storage.

    Args:
        without: a text that the names of entries end with which are no weights and are passed over, whatever they hold.

    Raises:
        CheckpointError: an entry is no tensor, or does not lie where it must.
    """
    if not isinstance(table, Mapping):
        raise CheckpointError(file, f"holds {type(table).__name__} where a table of tensors must stand")
    found: dict[str, Part] = {}
    for name, value in table.items():
        if without and isinstance(name, str) and name.endswith(without):
            continue
        if not isinstance(name, str) or not isinstance(value, StoredTensor):
            raise CheckpointError(file, f"has {name!r}: {type(value).__name__} where a name and a tensor must stand")
        found[name] = (file, archive.extent(name, value))
    return found


def check_one_step(files: Sequence[tuple[str, float | None]]) -> None:
    """All ranks' files are of one save: a later one that was interrupted leaves new files beside old ones of their names.

    Args:
        files: each file, and the step of training that it tells; ``None`` where it tells none.

    Raises:
        CheckpointError: they are of different steps.
    """
    known = [(file, step) for file, step in files if step is not None]
    for file, step in known:
        first, expected = known[0]
        if step != expected:
            rule = f"is of step {step:g}, {first} of step {expected:g}: two saves lie in one folder"
            raise CheckpointError(file, f"{rule}; was the later one interrupted?")


def step_in(tree: object, *keys: str) -> int | None:
    """The step of training in a rank's table, under the first of the keys that has one; ``None`` where none has."""
    values = [tree.get(key) for key in keys] if isinstance(tree, Mapping) else []
    return next((value for value in values if type(value) is int and value >= 0), None)


class Ranks:
    """The tensors of one layer, by the names that every rank has for its own part of them. Each is taken once."""

    def __init__(self, where: str, ranks: Sequence[Mapping[str, Part]]) -> None:
        """
        Args:
            where: the file that messages name.
            ranks: the tables of the ranks, in order.

        Raises:
            CheckpointError: the ranks do not have the same names.
        """
        self.where = where
        self._ranks = [dict(rank) for rank in ranks]
        first = self._ranks[0]
        for rank in self._ranks[1:]:
            for name in sorted(first.keys() ^ rank.keys()):
                has, lacks = (first, rank) if name in first else (rank, first)
                others = next(iter(lacks.values()), None)
                beside = f"which {others[0]} does not have" if others else "which another rank does not have"
                raise CheckpointError(has[name][0], f"holds tensor {name!r}, {beside}")

    def find(self, *names: str) -> list[Part] | None:
        """The parts of the first of ``names`` that is there, in the order of the ranks; ``None`` where none is.

        Raises:
            CheckpointError: the ranks keep parts of different number of dimensions or data type.
        """
        for name in names:
            if name in self._ranks[0]:
                parts = [rank.pop(name) for rank in self._ranks]
                if len({(extent.dtype, len(extent.shape)) for _, extent in parts}) > 1:
                    raise CheckpointError(parts[0][0], f"tensor {name!r} has another data type or form on another rank")
                return parts
        return None

    def take(self, *names: str) -> list[Part]:
        """The parts of the first of ``names`` that is there, in the order of the ranks.

        Raises:
            CheckpointError: none is there, or the ranks keep parts of different number of dimensions or data type.
        """
        found = self.find(*names)
        if found is None:
            raise CheckpointError(self.where, f"has no tensor {' or '.join(repr(name) for name in names)}")
        return found

    def has(self, name: str) -> bool:
        """Whether the ranks have a tensor of this name that was not taken."""
        return name in self._ranks[0]

    def drop(self, *ends: str) -> None:
        """Leave out what models compute themselves: tensors whose names end so."""
        for rank in self._ranks:
            for name in [name for name in rank if name.endswith(ends)]:
                del rank[name]

    def check_all_taken(self) -> None:
        """Refuse a tensor that nothing asked for: it would be left out without a word.

        Raises:
            CheckpointError: there is one.
        """
        for name, (file, _) in self._ranks[0].items():
            raise CheckpointError(file, f"holds tensor {name!r}, which is not known of this layout and this configuration")


def _sound(parts: Sequence[Part], what: str, make: Callable[[], Made]) -> Made:
    """What ``make`` makes of ``parts``; that their shapes do not fit is the fault of the first part's file."""
    try:
        return make()
    except ValueError as error:
        raise CheckpointError(parts[0][0], f"{what}: {error}") from None


def by_rows(parts: Sequence[Part], what: str = "a tensor") -> Stored:
    """Parts one below the other, neighbours in a file as one.

    Args:
        what: the name for messages.

    Raises:
        CheckpointError: the parts do not fit together.
    """
    merged: list[Part] = []
    for file, extent in parts:
        if merged and _continues(merged[-1], file, extent):
            last = merged[-1][1]
            merged[-1] = (file, dataclasses.replace(last, shape=(last.shape[0] + extent.shape[0], *last.shape[1:])))
        else:
            merged.append((file, extent))
    return _sound(parts, what, lambda: joined(0, merged))


def _continues(before: Part, file: str, extent: Extent) -> bool:
    """Whether these rows follow those of ``before`` in the same tensor of the same file."""
    if before[0] != file or not extent.shape:
        return False
    last = before[1]
    same = (last.dtype, last.strides, last.shape[1:]) == (extent.dtype, extent.strides, extent.shape[1:])
    return same and last.offset_bytes + last.shape[0] * last.strides[0] * last.item_bytes == extent.offset_bytes


def by_columns(parts: Sequence[Part], what: str = "a tensor") -> Stored:
    """Parts side by side.

    Raises:
        CheckpointError: the parts do not fit together.
    """
    for file, extent in parts:
        if len(extent.shape) != 2:
            raise CheckpointError(file, f"{what}: has shape {list(extent.shape)}; a matrix is expected")
    return _sound(parts, what, lambda: joined(1, parts))


def merged(merge: Literal["sum", "mean"], parts: Sequence[Part], what: str = "a tensor") -> Stored:
    """The sum or the average of what every rank has whole.

    Raises:
        CheckpointError: the shapes differ.
    """
    return _sound(parts, what, lambda: copies(merge, parts))


def one_copy(parts: Sequence[Part], what: str = "a tensor") -> Stored:
    """What every rank has whole and alike, of which one is read.

    Raises:
        CheckpointError: the shapes differ.
    """
    merged("mean", parts, what)
    return whole(*parts[0])


def cut(part: Part, sizes: Sequence[int], what: str = "a tensor") -> list[Part]:
    """Rows of a part, cut into stretches of ``sizes`` that are all of it.

    Raises:
        CheckpointError: they are more or fewer than its rows.
    """
    file, extent = part
    rows = extent.shape[0] if extent.shape else 0
    if sum(sizes) != rows or min(sizes) < 1:
        rule = f"{what}: has {rows} rows; by the configuration they are {'+'.join(str(size) for size in sizes[:6])}"
        raise CheckpointError(file, rule + (f"+... ({sum(sizes)})" if len(sizes) > 6 else ""))
    found: list[Part] = []
    start = 0
    for size in sizes:
        found.append((file, extent.narrow(0, start, start + size)))
        start += size
    return found


def transposed(stored: Stored) -> Stored:
    """A matrix with rows and columns exchanged; a vector as it is."""
    pieces = tuple(Piece(piece.file, piece.extent.transposed(), piece.start[::-1]) for piece in stored.pieces)
    return Stored(stored.dtype, stored.shape[::-1], pieces, stored.merge)


def divided(number: int, by: int, what: str, file: str) -> int:
    """``number / by``, which must be whole.

    Raises:
        CheckpointError: it is not.
    """
    if by < 1 or number % by:
        raise CheckpointError(file, f"{number} {what} are not a multiple of {by}")
    return number // by


def dtype_name(stored: Stored) -> Any:
    """What ``config.json`` calls the data type of a tensor; ``None`` for integers, of which no model is."""
    return _FLOATS.get(stored.dtype)
