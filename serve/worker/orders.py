"""Orders to all ranks beside their steps, and the ranks' answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

from serve.engine.executor import ExecutorDied
from serve.worker import wire


class Orders:
    """Sends one order at a time, and waits until each rank that it went to has answered it. Any thread."""

    def __init__(self, sockets: Sequence[socket.socket], timeout_seconds: float) -> None:
        """Send on sockets that the ranks listen to.

        Args:
            sockets: one for each rank, rank 0 first.
            timeout_seconds: how long an answer may take.
        """
        self._sockets = tuple(sockets)
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()

    def ask(self, order: wire.Order, ranks: Sequence[int] | None = None) -> list[wire.Report]:
        """The answers of these ranks, in their order; of all without ``ranks``.

        Raises:
            ConfigError: a rank could not do it, and the checkpoint or an option is at fault.
            RankStartError: a rank could not do it.
            ExecutorDied: the ranks are gone, or do not answer.
        """
        asked = self._sockets if ranks is None else [self._sockets[rank] for rank in ranks]
        payload, reports = wire.encode(order), list[wire.Report]()
        with self._lock:
            deadline = time.monotonic() + self._timeout_seconds
            try:
                for end in asked:
                    wire.send(end, payload)
                for end in asked:
                    end.settimeout(max(0.001, deadline - time.monotonic()))
                    reports.append(wire.decode_report(wire.receive(end)))
                    end.settimeout(None)
            except (wire.ConnectionLost, wire.Malformed, OSError) as error:
                raise ExecutorDied(f"the ranks did not answer what they were told beside their steps: {error}") from error
        failures = [report for report in reports if isinstance(report, wire.Failed)]
        if failures:
            raise min(failures, key=lambda failure: not failure.configured).error()
        return reports
