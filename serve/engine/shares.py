"""Whose turn it is among tenants that wait: start-time fair queueing (Goyal, Vin, Cheng 1996), over tokens."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from serve.types import Generation

_MOST_IDLE: Final = 4096
"""Tenants' next turns that are remembered of priorities nobody asks for at the moment."""
_FEW: Final = 16


class _Line:
    """The clock of one priority, and the tenants that are ahead of it."""

    __slots__ = ("next", "now", "num_live", "prune_at")

    def __init__(self) -> None:
        self.now = 0
        self.next: dict[str, int] = {}
        self.num_live = 0
        """Sequences of this priority that wait or run."""
        self.prune_at = _FEW

    def prune(self) -> None:
        """Forget the tenants that the clock has caught up with. As many come before the next time as stay now, or more."""
        self.next = {tenant: turn for tenant, turn in self.next.items() if turn > self.now}
        self.prune_at = max(_FEW, 2 * len(self.next))


class Shares:
    """Gives each request a turn; the smallest is next. Per priority, on a clock that counts the turns of what began.

    A tenant's next turn is later by what its request before may cost, and never before the clock: however many requests one
    tenant has waiting, a request of another comes after at most one of them. Turns of a single tenant are in order of arrival.

    A priority is remembered while a sequence of it lives. Of those without any only the latest are, so that a client which
    asks for ever other priorities costs neither memory nor time: to one that was forgotten, all tenants come as equals.
    """

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}
        self._idle: OrderedDict[int, _Line] = OrderedDict()
        """The lines that nothing lives of, longest so first."""
        self._num_idle = 0
        """How many tenants' turns those remember."""

    def enter(self, generation: Generation, turn: int | None = None) -> int:
        """A sequence comes to wait. The turn of its request, which has it already unless it is the first one's."""
        line = self._line(generation.priority)
        line.num_live += 1
        if turn is not None:
            return turn
        turn = max(line.now, line.next.get(generation.tenant, 0))
        cost = len(generation.prompt_ids) + generation.stopping.max_new_tokens * generation.num_sequences
        line.next[generation.tenant] = turn + max(1, cost)
        if len(line.next) > line.prune_at:
            line.prune()
        return turn

    def began(self, priority: int, turn: int) -> None:
        """A sequence that entered, and has not left, no longer waits."""
        line = self._lines[priority]
        line.now = max(line.now, turn)

    def leave(self, priority: int) -> None:
        """A sequence that entered neither waits nor runs any more."""
        line = self._lines[priority]
        line.num_live -= 1
        if line.num_live:
            return
        self._idle[priority] = line
        self._num_idle += len(line.next)
        while self._num_idle > _MOST_IDLE:
            oldest, forgotten = self._idle.popitem(last=False)
            self._num_idle -= len(forgotten.next)
            del self._lines[oldest]

    def _line(self, priority: int) -> _Line:
        line = self._lines.get(priority)
        if line is None:
            line = self._lines[priority] = _Line()
        elif not line.num_live:
            del self._idle[priority]
            self._num_idle -= len(line.next)
        return line

    def check(self, num_live: int) -> None:
        """Assert what must always hold, given how many sequences entered and have not left. For tests."""
        assert sum(line.num_live for line in self._lines.values()) == num_live, "the sequences that live are counted wrong"
        idle = {priority for priority, line in self._lines.items() if not line.num_live}
        assert idle == set(self._idle), "the priorities that nobody asks for are not those that may be forgotten"
        assert sum(len(line.next) for line in self._idle.values()) == self._num_idle, "what they remember is counted wrong"
        assert self._num_idle <= _MOST_IDLE, "more is remembered than may be"
