"""What ranks that compute nothing record: what a test has put there."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from serve.engine.executor import ExecutorDied, Profiled


class FakeProfiling:
    """Profiling of two ranks. Tests reach in from the event loop's thread."""

    PART_BYTES = 4

    def __init__(self) -> None:
        self.traces = {0: b"trace of 0", 1: b"trace of 1, longer"}
        self.over = threading.Event()
        """Cleared: the ranks go on recording."""
        self.over.set()
        self.num_steps: int | None = None
        """That were computed in time; as many as were asked for without it."""
        self.failure = ""
        self.dead = False
        self.begun: list[tuple[tuple[int, ...], int, float]] = []
        self.num_forgets = 0

    def begin(self, ranks: Sequence[int], steps: int, at_most_seconds: float) -> None:
        self._alive()
        self.begun.append((tuple(ranks), steps, at_most_seconds))

    def told(self, ranks: Sequence[int]) -> tuple[Profiled, ...]:
        self._alive()
        steps = self.begun[-1][1] if self.num_steps is None else self.num_steps
        return tuple(Profiled(steps, self.over.is_set(), len(self.traces[rank]), self.failure) for rank in ranks)

    def part(self, rank: int, offset: int) -> bytes:
        self._alive()
        return self.traces[rank][offset : offset + self.PART_BYTES]

    def forget(self, ranks: Sequence[int]) -> None:
        self.num_forgets += 1
        self._alive()

    def _alive(self) -> None:
        if self.dead:
            raise ExecutorDied("rank 1 died: signal SIGKILL")
