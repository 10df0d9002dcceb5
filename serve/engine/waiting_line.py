"""Sequences that wait for a place in the running batch."""

from __future__ import annotations

from collections.abc import Set

from serve.engine.lazy_heap import Key, LazyHeap
from serve.engine.sequence import Sequence


class WaitingLine:
    """Sequences by key, the smallest first; the first of each tenant can be asked for too.

    Costs are those of a ``LazyHeap``, however many wait.
    """

    def __init__(self) -> None:
        self._all: LazyHeap[Sequence] = LazyHeap()
        self._of: dict[str, LazyHeap[Sequence]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._all

    @property
    def tenants(self) -> Set[str]:
        """The tenants of whom a sequence waits."""
        return self._of.keys()

    def push(self, seq: Sequence, key: Key) -> None:
        """Add a sequence that does not wait."""
        self._all.push(seq, key)
        self._of.setdefault(seq.tenant, LazyHeap()).push(seq, key)

    def discard(self, seq: Sequence) -> bool:
        """Take a sequence out, wherever it is; False if it does not wait."""
        if not self._all.discard(seq):
            return False
        own = self._of[seq.tenant]
        own.discard(seq)
        if not own:
            del self._of[seq.tenant]
        return True

    def first(self) -> Sequence | None:
        """Whose turn it is; it stays. ``None`` if nobody waits."""
        return self._all.first()

    def first_of(self, tenant: str) -> Sequence | None:
        """Whose turn it is among those of a tenant."""
        own = self._of.get(tenant)
        return own.first() if own is not None else None

    def check(self) -> None:
        """Assert what must always hold. For tests."""
        self._all.check()
        for tenant, own in self._of.items():
            own.check()
            assert len(own), f"an empty line of {tenant!r} is kept"
        assert sum(len(own) for own in self._of.values()) == len(self._all), "the lines of the tenants are not the whole"
