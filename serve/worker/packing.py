"""Packs weights while their model serves: until then they are used where they lie in their files.

What a start spends on packing is mostly new memory, a page after the other. A checkpoint's pages are in memory when they have
been read once, and a product that packs each panel for itself takes about twice as long with few rows, and little more with
many. So a model serves as soon as its files are mapped; each of its weights is packed when there is time, and the files are
given back. What else weights are to have while a model serves comes behind that: large pages, and a narrower copy of the head.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from torch import Tensor

from checkpoint.opening.mapped import keep
from serve.model.filling import Waiting
from serve.model.linear import Panels
from serve.model.narrow_head import NarrowHead
from serve.model.pace import Pace
from serve.model.weight_memory import gather_pages
from serve.worker.rest import Rest

BLOCK_BYTES: Final = 2 << 20
"""What is packed before the next wait."""
FIRST_SECONDS: Final = 1.0
"""How long whoever waited for the start has the processor alone."""
_LOOK_SECONDS: Final = 0.05
"""How long to wait for the end of a step before the next weight is packed."""

_log = logging.getLogger(__name__)


class Packing:
    """A thread that packs what was left for later, then makes large pages of small ones, then copies the head."""

    def __init__(self, waiting: Iterable[Waiting], rest: Rest, narrow: NarrowHead | None = None) -> None:
        """
        Args:
            waiting: weights that are used where they lie.
            rest: when the processor is free for this.
            narrow: a head that is copied once it is packed.
        """
        self._waiting = list(waiting)
        self._rest = rest
        self._narrow = narrow
        self._hurry = threading.Event()
        self._done = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._begin(self._run)

    @staticmethod
    def _begin(work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="pack-weights", daemon=True).start()

    def finish(self) -> None:
        """Return when no weight lies in a file any more but those that could not be packed or copied, which the log tells of;
        from now on without waiting for the processor. So it is, too, when somebody waits to write to one of the files."""
        self._hurry.set()
        self._done.wait()

    def go_on(self) -> None:
        """Do what is to be done beside steps with the weights that have just taken the others' places."""
        self._begin(self._finish)

    def _run(self) -> None:
        try:
            self._settle()
        finally:
            for waiting in self._waiting:
                waiting.leases.give_back()
            self._waiting.clear()
            self._done.set()
        self._finish()

    def _finish(self) -> None:
        with self._one_at_a_time:
            gather_pages(self._rest.wait)
            if self._narrow is not None:
                self._narrow.build(Pace(self._rest.wait))

    def _settle(self) -> None:
        if any(each.panels or each.views for each in self._waiting):
            begun = time.monotonic()
            while not self._hurries and (left := begun + FIRST_SECONDS - time.monotonic()) > 0.0:
                self._hurry.wait(min(left, _LOOK_SECONDS))
        pace = Pace(self._wait)
        for waiting in self._waiting:
            self._pack(waiting.panels, pace)
        for waiting in self._waiting:
            self._keep(waiting.views, pace)

    @property
    def _hurries(self) -> bool:
        if not self._hurry.is_set() and any(waiting.leases.is_awaited for waiting in self._waiting):
            _log.info("somebody waits to write to a file of the checkpoint, until its weights are packed")
            self._hurry.set()
        return self._hurry.is_set()

    def _wait(self, longest: float) -> None:
        if not self._hurries:
            self._rest.wait(longest)

    def _pack(self, waiting: list[Panels], pace: Pace) -> None:
        left: list[Tensor] = []  # rows that a product which has begun may still read
        while waiting:
            with _told():
                left.append(self._packed(waiting.pop(0), pace))
            if self._rest.between_steps(0.0 if self._hurries else _LOOK_SECONDS):
                left.clear()
        while left and not self._rest.between_steps(_LOOK_SECONDS):
            pass

    def _packed(self, panels: Panels, pace: Pace) -> Tensor:
        """Pack a weight; the rows that its products have read until now."""
        rows_OI = panels.rows
        assert rows_OI is not None, "it was packed already"
        step = max(1, BLOCK_BYTES // (rows_OI[0].nbytes * Panels.ROWS)) * Panels.ROWS
        for begin in range(0, len(rows_OI), step):
            with pace.part():
                panels.put(begin, rows_OI[begin : begin + step], threads=1)
        panels.settle()
        return rows_OI

    def _keep(self, views: list[Tensor], pace: Pace) -> None:
        while views:
            parts, goes_on = keep(views.pop(0)), True
            with _told():
                while goes_on:
                    with pace.part():
                        goes_on = next(parts, self) is not self


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Within, a weight is packed or copied; where it cannot be, the log says so and it is used where it is."""
    try:
        yield
    except Exception as error:
        why = str(error) if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
        _log.warning(
            "a weight stays in its file, which must not be written over while it is served: %s",
            why,
            exc_info=not isinstance(error, MemoryError),
        )
