"""What processes really hold: Linux' own account of each one's peak, read from outside.

Host memory of a run is the sum over its ranks of the peak of their own pages, and the pages of files they map in common once:
sum of (VmHWM - RssFile), and the largest RssFile. The kernel keeps the peak itself, so nothing between two readings is missed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_EVERY_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Pages:
    """Resident memory of one process, in bytes."""

    own: int
    """Now, files not counted."""
    peak: int
    """At most so far, files not counted."""
    files: int
    """Pages of files, most of them shared."""


def pages_of(process: int | str = "self") -> Pages | None:
    """Memory of a process; ``None`` when it is gone, or the system does not tell."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return None
    rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    try:
        resident, peak, files = (int(rows[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM", "RssFile"))
    except (KeyError, ValueError, IndexError):  # a process that has ended and was not waited for has no memory
        return None
    return Pages(own=resident - files, peak=peak - files, files=files)


class MemoryWatch:
    """Reads the memory of some processes while it is entered, on a thread of its own."""

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = list(processes)
        self._seen: dict[int, Pages] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)

    def __enter__(self) -> Self:
        self._look()  # before the thread has its turn a short run may be over
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._look()
            self._stop.wait(_EVERY_SECONDS)
        self._look()

    def _look(self) -> None:
        for process in self._processes:
            pages = pages_of(process)
            if pages is not None:
                before = self._seen.get(process)
                self._seen[process] = (
                    pages
                    if before is None
                    else Pages(own=pages.own, peak=max(before.peak, pages.peak), files=max(before.files, pages.files))
                )

    @property
    def peak_bytes(self) -> int:
        """Peak of all processes together; 0 when nothing could be read."""
        seen = list(self._seen.values())
        return sum(pages.peak for pages in seen) + max((pages.files for pages in seen), default=0)

    @property
    def peaks(self) -> list[int]:
        """Peak of each process's own pages, in the order given."""
        return [self._seen[process].peak for process in self._processes if process in self._seen]
