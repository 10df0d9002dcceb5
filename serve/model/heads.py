"""Which heads of a model each rank computes, and which layers each stage. No torch: also asked before there is a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from serve.errors import ConfigError

_MOST_RANKS: Final = 1024

QUERY: Final = "query"
KEY: Final = "key"
VALUE: Final = "value"


@dataclass(frozen=True, slots=True)
class Piece:
    """Indices ``[begin, end)`` of one dimension."""

    begin: int
    end: int

    @property
    def width(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCut:
    """How ``size`` ranks share a model's heads.

    Up to as many ranks as there are key/value heads, those are dealt out whole, the first ranks taking what is left over, and
    the query heads go with theirs. With more ranks each has one key/value head, the same one on several, and the query heads
    are dealt out by themselves.
    """

    query: int
    """Query heads of the whole model."""
    shared: int
    """Key/value heads of the whole model."""
    size: int

    @property
    def repeats(self) -> bool:
        """Whether a key/value head is on more than one rank."""
        return self.size > self.shared

    @property
    def unit(self) -> int:
        """Into how many parts, none of them ever divided, the heads fall: DeepSpeed's number of key/value heads."""
        return self.query if self.repeats else self.shared

    def query_heads(self, rank: int) -> Piece:
        part, times = near_even(self.unit, self.size, rank), self.query // self.unit
        return Piece(part.begin * times, part.end * times)

    def shared_heads(self, rank: int) -> Piece:
        if not self.repeats:
            return near_even(self.shared, self.size, rank)
        head = rank * self.shared // self.size
        return Piece(head, head + 1)

    def rows(self, kinds: Sequence[str], whole: int, rank: int) -> tuple[Piece, ...]:
        """A rank's rows of a tensor that holds parts of these kinds one after the other.

        Args:
            kinds: of each part whether it is of queries, keys or values; parts of a kind are equal shares of its heads.
            whole: rows of the whole tensor.
        """
        times = kinds.count(QUERY) or kinds.count(KEY) or kinds.count(VALUE)
        per_head = whole * times // sum(self._heads(kind) for kind in kinds)
        pieces, offset = [], 0
        for kind in kinds:
            mine = self.query_heads(rank) if kind == QUERY else self.shared_heads(rank)
            pieces.append(Piece(offset + mine.begin * per_head // times, offset + mine.end * per_head // times))
            offset += self._heads(kind) * per_head // times
        return tuple(pieces)

    def widths(self, kinds: Sequence[str], whole: int) -> tuple[int, ...]:
        """Rows of each part of such a tensor."""
        total = sum(self._heads(kind) for kind in kinds)
        return tuple(whole * self._heads(kind) // total for kind in kinds)

    def _heads(self, kind: str) -> int:
        return self.query if kind == QUERY else self.shared


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the groups of ranks that have a model's layers, one after another."""

    number: int = 0
    """Counted from 0, in the order of the layers."""
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head, and so draws the tokens."""
        return self.number == self.count - 1

    def layers(self, whole: int) -> Piece:
        """Its layers of a model of so many: near even, the first stages taking what is left over, the last one the head."""
        return near_even(whole, self.count, self.number)


def check_pipeline_parallel(layers: int, count: int) -> None:
    """Refuse more stages than there are layers.

    Raises:
        ConfigError: that.
    """
    if count > layers:
        raise ConfigError(
            f"model.pipeline_parallel_size is {count}; the model's {layers} layers can be dealt out to at most as many stages"
        )


def near_even(total: int, size: int, rank: int) -> Piece:
    """Part ``rank`` of ``total`` things dealt out to ``size``: the first ranks take the remainder."""
    share, rest = divmod(total, size)
    begin = rank * share + min(rank, rest)
    return Piece(begin, begin + share + (rank < rest))


def check_tensor_parallel(query: int, shared: int, size: int, *, multiple: int = 1, repeats: bool = True) -> None:
    """Refuse a tensor-parallel size by which the heads cannot be dealt out.

    Args:
        multiple: each rank must have a multiple of so many query heads, and the same number.
        repeats: whether a key/value head can be given to several ranks.

    Raises:
        ConfigError: names the sizes that work.
    """
    if not _fits(query, shared, size, multiple, repeats):
        allowed = [n for n in range(1, min(query, _MOST_RANKS) + 1) if _fits(query, shared, n, multiple, repeats)]
        raise ConfigError(
            f"model.tensor_parallel_size is {size}; the model's {query} query heads and {shared} key/value heads can be dealt "
            f"out to as many ranks as {', '.join(map(str, allowed))}"
        )


def _fits(query: int, shared: int, size: int, multiple: int, repeats: bool) -> bool:
    if multiple > 1 and query % (multiple * size):
        return False
    if size <= shared:
        return True
    if shared == 1:
        return repeats and size <= query
    return repeats and size % shared == 0 and query % size == 0
