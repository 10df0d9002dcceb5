"""When a rank has nothing to compute, for its own work that has no hurry."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_QUIET_SECONDS: Final = 0.005
"""Longer than what lies between two steps of a sequence."""


class Rest:
    """Tells a thread of the same process when no step is computed. Steps are of one thread, who waits may be any other's."""

    def __init__(self) -> None:
        self._rests = threading.Event()
        self._rests.set()

    @property
    def rests(self) -> bool:
        """Whether no step is computed now."""
        return self._rests.is_set()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Within, a step is computed; and perhaps another in the middle of it."""
        rested = self._rests.is_set()
        self._rests.clear()
        try:
            yield
        finally:
            if rested:
                self._rests.set()

    def wait(self, longest: float) -> None:
        """Return when no step has been computed for a moment; where steps never end, ``longest`` seconds later."""
        end = time.monotonic() + longest
        while (left := end - time.monotonic()) > 0.0:
            if self._rests.wait(left):
                time.sleep(min(_QUIET_SECONDS, max(end - time.monotonic(), 0.0)))
                if self._rests.is_set():
                    return

    def between_steps(self, longest: float) -> bool:
        """Return as soon as no step is computed, or after so many seconds; whether there was such a moment since the call."""
        return self._rests.wait(longest)
