"""How far a rank is, for those who watch it from outside."""

from __future__ import annotations

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

    __slots__ = ("count", "device_bytes", "waiting")

    def __init__(self) -> None:
        self.count = 0
        self.waiting = False
        """Whether it waits for other ranks, however long they take."""
        self.device_bytes = 0
        """What this process has taken of its device's memory, when it was last looked at."""

    def mark(self) -> None:
        """Count one thing more that the rank has come to."""
        self.count += 1

    def reach(self, stage: int, stages: int) -> None:
        """The step's part of a stage begins, or with ``stage`` equal to ``stages`` the step ends.

        A stage has counts of its own range, above those of the stages before it. So one that waits for an earlier stage is not
        behind it, and one that is through with a step is not behind those that are not.
        """
        whole = stages * _MOST_IN_STAGE
        self.count = max(self.count, self.count // whole * whole + stage * _MOST_IN_STAGE)

    @contextmanager
    def with_others(self) -> Iterator[None]:
        """Within, this rank may do nothing for a long time because another one has much to do."""
        before, self.waiting = self.waiting, True
        try:
            yield
        finally:
            self.waiting = before
