"""What the processes of ranks write to their standard output and error, line by line into the server's log."""

from __future__ import annotations

import os
import threading
from typing import Final

from serve import logs

_LINE_BYTES: Final = 1 << 16
"""Longer lines are cut into several."""
_LAST_WORDS_SECONDS: Final = 2.0


class RankOutput:
    """One pipe, and the thread that reads it until all who could write to it have ended.

    Ranks do not hold what the server logs to: its log may be a file that is rotated, or JSON, and stays one.
    """

    def __init__(self, source: str, rank: int | None = None) -> None:
        """
        Args:
            source: logger of what was printed and not logged.
        """
        self._source, self._rank = source, rank
        self._reads, self.writes = os.pipe()
        """``writes`` is the end for the process's descriptors 1 and 2."""
        self._thread = threading.Thread(target=self._read, daemon=True, name="rank-output")
        self._thread.start()

    def handed_over(self) -> None:
        """Give up our hold of the end that the process, if it was started, has by now."""
        if self.writes >= 0:
            os.close(self.writes)
            self.writes = -1

    def wait(self) -> None:
        """Return when the last words of a process that has ended are logged, or soon."""
        self._thread.join(_LAST_WORDS_SECONDS)

    def _read(self) -> None:
        with os.fdopen(self._reads, "rb") as lines:
            while line := lines.readline(_LINE_BYTES):
                if text := line.decode(errors="backslashreplace").rstrip():
                    logs.say(text, source=self._source, rank=self._rank)
