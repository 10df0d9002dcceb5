"""How many bytes of what clients sent wait for a thread, and whether there is room for more."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Final

from serve.errors import QueueFull

_RETRY_SECONDS: Final = 1.0


class Room:
    """Counts the bytes of messages and texts that wait for a thread or are worked on there, by whose they are.

    A caller may have as many as are left of all there may be: one alone half of them, and each of several the same part, so
    that there is some left for another at any time. Belongs to the event loop.
    """

    def __init__(self) -> None:
        self._num_bytes: Counter[str] = Counter()
        """By caller; nobody has 0."""

    def num_bytes(self, whose: str) -> int:
        """How many of a caller are counted."""
        return self._num_bytes[whose]

    @contextlib.contextmanager
    def taken(self, whose: str, num_bytes: int, most_bytes: int | None) -> Iterator[None]:
        """Within, so many bytes of a caller wait or are worked on.

        Args:
            most_bytes: of all callers together; ``None`` for what is counted and must not be refused.

        Raises:
            QueueFull: the caller's would be more than are left. Where nothing waits there is room for a message of any size.
        """
        total, own = self._num_bytes.total(), self._num_bytes[whose]
        if most_bytes is not None and total and own + num_bytes > most_bytes - (total + num_bytes):
            message = f"{own} bytes of this caller wait to be read or to become tokens, and there is no room for {num_bytes}"
            raise QueueFull(f"{message} more; try again in 1 s", reason="bytes", retry_after_seconds=_RETRY_SECONDS)
        self._num_bytes[whose] += num_bytes
        try:
            yield
        finally:
            self._num_bytes[whose] -= num_bytes
            if not self._num_bytes[whose]:
                del self._num_bytes[whose]
