"""Work beside steps, in parts: between two of them it waits for longer, the dearer they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

WAITS: Final = 2.0
"""Where steps never end, the next part waits for this many times as long as the last one took of the processor, between the two
limits below."""
LEAST_WAIT_SECONDS: Final = 0.002
MOST_WAIT_SECONDS: Final = 0.05


class Pace:
    """Lets the parts of some work wait, each by what the one before took."""

    def __init__(self, wait: Callable[[float], None]) -> None:
        """
        Args:
            wait: called before each part: returns when the processor is free for it, or after so many seconds.
        """
        self._wait = wait
        self._took = 0.0

    @contextmanager
    def part(self) -> Iterator[None]:
        """Within, one part is done; it begins after the wait."""
        self._wait(min(max(WAITS * self._took, LEAST_WAIT_SECONDS), MOST_WAIT_SECONDS))
        began = time.thread_time()  # without the time for which other threads of Python let it wait
        yield
        self._took = time.thread_time() - began
