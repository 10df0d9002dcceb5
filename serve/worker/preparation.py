"""Has all ranks make other weights ready while they go on with their steps."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from typing import Final, TypeVar

from serve.config import ServerConfig
from serve.engine.executor import ExecutorDied, Prepared, Unlike
from serve.errors import RankStartError
from serve.worker import wire

_GIB: Final = 1 << 30
_KEPT_FREE: Final = 0.1
"""Share of the free memory that new weights leave alone."""

R = TypeVar("R", bound=wire.Report)
_log = logging.getLogger(__name__)


class Preparation:
    """Orders to the ranks, one at a time, each answered by every rank. Any thread."""

    def __init__(self, orders: Sequence[socket.socket], timeout_seconds: float, *, shared_memory: bool) -> None:
        """Send on sockets that the ranks listen to.

        Args:
            orders: one for each rank, rank 0 first.
            timeout_seconds: how long an answer may take.
            shared_memory: whether the ranks' weights lie in the memory of one machine.
        """
        self._orders = orders
        self._timeout_seconds = timeout_seconds
        self._shared_memory = shared_memory
        self._lock = threading.Lock()

    def prepare(self, config: ServerConfig, number: int) -> Prepared | Unlike:
        """Have every rank read the checkpoint of ``config`` beside what it serves, or be ready to read it into place.

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
            beside = self._fits(alike, config.model.swap_memory_gib)
            self._ask(wire.Prepare(number, beside))
            return Prepared(alike[0].checkpoint_step, beside)

    def forget(self) -> None:
        """Have the ranks give back what was prepared, or exchanged; nothing, if they are gone."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        try:
            self._ask(wire.Forget())
        except (ExecutorDied, RankStartError) as error:
            _log.debug("the ranks were told to forget prepared weights: %s", error)

    def _fits(self, ranks: Sequence[wire.Alike], limit_gib: float | None) -> bool:
        """Whether there is memory for the new weights beside the old."""
        needed = sum(rank.num_bytes for rank in ranks)
        if limit_gib is not None and needed > limit_gib * _GIB:
            return False
        if self._shared_memory:
            return needed <= (1.0 - _KEPT_FREE) * min(rank.free_bytes for rank in ranks)
        return all(rank.num_bytes <= (1.0 - _KEPT_FREE) * rank.free_bytes for rank in ranks)

    def _ask(self, order: wire.Order) -> list[wire.Report]:
        payload, deadline = wire.encode(order), time.monotonic() + self._timeout_seconds
        try:
            for orders in self._orders:
                wire.send(orders, payload)
            reports = []
            for orders in self._orders:
                orders.settimeout(max(0.001, deadline - time.monotonic()))
                reports.append(wire.decode_report(wire.receive(orders)))
                orders.settimeout(None)
        except (wire.ConnectionLost, wire.Malformed, OSError) as error:
            raise ExecutorDied(f"the ranks did not answer while they prepared other weights: {error}") from error
        failures = [report for report in reports if isinstance(report, wire.Failed)]
        if failures:
            self._forget()
            raise min(failures, key=lambda failure: not failure.configured).error()
        return reports
