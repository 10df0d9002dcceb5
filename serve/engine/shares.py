"""Whose turn it is among tenants that wait: start-time fair queueing (Goyal, Vin, Cheng 1996), over tokens."""

from __future__ import annotations

from typing import Final

from serve.types import Generation

_MANY: Final = 1024


class Shares:
    """Gives each request a turn; the smallest is next. Per priority, on a clock that counts the turns of what began.

    A tenant's next turn is later by what its request before may cost, and never before the clock: however many requests one
    tenant has waiting, a request of another comes after at most one of them. Turns of a single tenant are in order of arrival.
    """

    def __init__(self) -> None:
        self._now: dict[int, int] = {}
        self._next: dict[tuple[int, str], int] = {}

    def turn(self, generation: Generation) -> int:
        """The turn of a request that comes to wait; asked once for each."""
        key = generation.priority, generation.tenant
        turn = max(self._now.get(generation.priority, 0), self._next.get(key, 0))
        cost = len(generation.prompt_ids) + generation.stopping.max_new_tokens * generation.num_sequences
        self._next[key] = turn + max(1, cost)
        return turn

    def began(self, priority: int, turn: int) -> None:
        """A request no longer waits."""
        self._now[priority] = max(self._now.get(priority, 0), turn)
        if len(self._next) > _MANY:
            self._next = {key: end for key, end in self._next.items() if end > self._now.get(key[0], 0)}
