"""Has all ranks make other weights ready while they go on with their steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final

from serve.config import ServerConfig
from serve.engine.executor import ExecutorDied, Prepared, Unlike
from serve.errors import StartError
from serve.worker import wire
from serve.worker.orders import Orders

_GIB: Final = 1 << 30
_KEPT_FREE: Final = 0.1
"""Share of the free memory that new weights leave alone."""

_log = logging.getLogger(__name__)


class Preparation:
    """One at a time. Any thread."""

    def __init__(self, orders: Orders, *, shared_memory: bool) -> None:
        """
        Args:
            orders: reach the ranks.
            shared_memory: whether the ranks' weights lie in the memory of one machine.
        """
        self._orders = orders
        self._shared_memory = shared_memory
        self._lock = threading.Lock()

    def prepare(self, config: ServerConfig, number: int) -> Prepared | Unlike:
        """Have every rank read the checkpoint of ``config`` beside what it serves, or be ready to read it into place.

        Where memory seems to suffice and a rank runs out of it all the same, all of them give back what they have read.

        Raises:
            ConfigError: the checkpoint is at fault.
            RankStartError: a rank could not do it.
            ExecutorDied: the ranks are gone, or do not answer.
        """
        with self._lock:
            alike: list[wire.Alike] = []
            for report in self._ask(wire.Look(config)):
                if isinstance(report, wire.Differs):
                    self._forget()
                    return Unlike(report.reason)
                assert isinstance(report, wire.Alike), f"{report} is no answer to what was asked"
                alike.append(report)
            beside = self._order(number, beside=self._fits(alike, config.model.swap_memory_gib))
            return Prepared(alike[0].checkpoint_step, beside)

    def forget(self) -> None:
        """Have the ranks give back what was prepared, or exchanged; nothing, if they are gone."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        try:
            self._orders.ask(wire.Forget())
        except (ExecutorDied, StartError) as error:
            _log.debug("the ranks were told to forget prepared weights: %s", error)

    def _order(self, number: int, *, beside: bool) -> bool:
        """Have the ranks prepare what they looked at. Returns whether it lies beside what they serve, on all of them."""
        reports = self._ask(wire.Prepare(number, beside))
        full = next(((rank, report) for rank, report in enumerate(reports) if isinstance(report, wire.NoRoom)), None)
        if full is None:
            return beside
        rank, report = full
        _log.warning(
            "rank %d has no room for other weights beside its own, so all will read them into place: %s", rank, report.reason
        )
        self._ask(wire.Prepare(number, beside=False))  # at which those that had room give back what they have read
        return False

    def _fits(self, ranks: Sequence[wire.Alike], limit_gib: float | None) -> bool:
        """Whether there is memory for the new weights beside the old."""
        needed = sum(rank.num_bytes for rank in ranks)
        if limit_gib is not None and needed > limit_gib * _GIB:
            return False
        if self._shared_memory:
            return needed <= (1.0 - _KEPT_FREE) * min(rank.free_bytes for rank in ranks)
        return all(rank.num_bytes <= (1.0 - _KEPT_FREE) * rank.free_bytes for rank in ranks)

    def _ask(self, order: wire.Order) -> list[wire.Report]:
        try:
            return self._orders.ask(order)
        except StartError:
            self._forget()
            raise
