"""How far a rank is, for those who watch it from outside."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_MOST_IN_STAGE: Final = 1 << 20
"""More than what one stage counts in one step."""


class Progress:
    """A number that grows with what a rank does, told with each heartbeat.

    The thread that works writes it, the one that beats reads it. All ranks count the same things in the same order (a plan
    received, a collective entered, a plan done), so of ranks that wait for one another the one with the lowest number hangs.
    """

    __slots__ = ("_own", "device_bytes", "in_kernels", "waiting")

    def __init__(self) -> None:
        self._own = 0
        self.in_kernels: Final = ctypes.c_int64()
        """What kernels have come to, which count it themselves while no Python runs."""
        self.waiting = False
        """Whether it waits for other ranks, however long they take."""
        self.device_bytes = 0
        """What this process has taken of its device's memory, when it was last looked at."""

    @property
    def count(self) -> int:
        """How many things the rank has come to."""
        return self._own + self.in_kernels.value

    def mark(self) -> None:
        """Count one thing more that the rank has come to."""
        self._own += 1

    def reach(self, stage: int, stages: int) -> None:
        """The step's part of a stage begins, or with ``stage`` equal to ``stages`` the step ends.

        A stage has counts of its own range, above those of the stages before it. So one that waits for an earlier stage is not
        behind it, and one that is through with a step is not behind those that are not.
        """
        whole = stages * _MOST_IN_STAGE
        count = self.count
        self._own += max(0, count // whole * whole + stage * _MOST_IN_STAGE - count)

    @contextmanager
    def with_others(self) -> Iterator[None]:
        """Within, this rank may do nothing for a long time because another one has much to do."""
        before, self.waiting = self.waiting, True
        try:
            yield
        finally:
            self.waiting = before
