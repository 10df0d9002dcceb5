"""Profiling of steps, as the server has the ranks make them and fetches them."""

from __future__ import annotations

from collections.abc import Sequence

from serve.engine.executor import Profiled
from serve.worker import wire
from serve.worker.orders import Orders


class Profiling:
    """One recording at a time; see ``serve.runtime.seams.Profiling``. Any thread."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    def begin(self, ranks: Sequence[int], steps: int, at_most_seconds: float) -> None:
        """Have these ranks record their next steps."""
        self._orders.ask(wire.Profile(steps, at_most_seconds), ranks)

    def told(self, ranks: Sequence[int]) -> tuple[Profiled, ...]:
        """How far each of them is."""
        answers = self._orders.ask(wire.TellProfiled(), ranks)
        return tuple(answer.recorded for answer in answers if isinstance(answer, wire.Told))

    def part(self, rank: int, offset: int) -> bytes:
        """What a trace has from there on; nothing behind its end."""
        (answer,) = self._orders.ask(wire.SendPart(offset), (rank,))
        return answer.data if isinstance(answer, wire.Part) else b""

    def forget(self, ranks: Sequence[int]) -> None:
        """Have them give their traces back, and record no more."""
        self._orders.ask(wire.ForgetProfiled(), ranks)
