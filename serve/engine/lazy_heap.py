"""A priority queue whose members may leave from the middle."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Key = tuple[float, ...]

_MIN_GARBAGE = 64
"""Left entries kept before the heap is rebuilt, so that small heaps are not rebuilt all the time."""


class LazyHeap(Generic[Item]):
    """Holds items by key, smallest first; between equal keys, the one pushed first.

    Pushing and popping cost O(log n). Discarding only strikes the item from ``_live``; its entry is thrown away when it
    comes to the top, or when struck entries outnumber live ones and the heap is rebuilt: O(1), amortised.

    Always true (see ``check``): each live item has exactly one entry with its serial, and at most
    ``len(self) + _MIN_GARBAGE`` entries are struck ones.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Key, int, Item]] = []
        self._live: dict[Item, int] = {}
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: Item) -> bool:
        return item in self._live

    def push(self, item: Item, key: Key) -> None:
        """Add an item that is not in the heap."""
        assert item not in self._live, f"{item!r} is in the heap already"
        self._live[item] = self._next_serial
        heappush(self._entries, (key, self._next_serial, item))
        self._next_serial += 1

    def discard(self, item: Item) -> bool:
        """Take an item out, wherever it is; False if it is not there."""
        if self._live.pop(item, None) is None:
            return False
        if len(self._entries) > 2 * len(self._live) + _MIN_GARBAGE:
            self._entries = [entry for entry in self._entries if self._live.get(entry[2]) == entry[1]]
            heapify(self._entries)
        return True

    def first(self) -> Item | None:
        """The item with the smallest key, which stays; ``None`` if the heap is empty."""
        entry = self._first_entry()
        return entry[2] if entry else None

    def first_key(self) -> Key | None:
        """The smallest key; ``None`` if the heap is empty."""
        entry = self._first_entry()
        return entry[0] if entry else None

    def _first_entry(self) -> tuple[Key, int, Item] | None:
        while self._entries:
            entry = self._entries[0]
            if self._live.get(entry[2]) == entry[1]:
                return entry
            heappop(self._entries)
        return None

    def check(self) -> None:
        """Assert what must always hold."""
        found = {item: serial for _, serial, item in self._entries if self._live.get(item) == serial}
        assert found == self._live, "a live item has no entry in the heap"
        garbage = len(self._entries) - len(self._live)
        assert garbage <= len(self._live) + _MIN_GARBAGE, f"{garbage} struck entries among {len(self._live)} live ones"
