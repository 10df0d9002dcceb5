"""How loaded the server is, told to balancers as ORCA load reports: at the end of calls, and as a stream beside them.

The messages are those of https://github.com/cncf/xds (``xds/data/orca/v3``), what balancers make of them is gRFC A51 and A58: a
server's weight is its calls a second by its utilisation, so each is a mean over the same few seconds. Both fade alike while
nothing is asked of the server, and its weight stays what it was.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import Final

from serve.engine.stats import EngineStats
from serve.errors import QueueFull, Unavailable
from serve.rpc.context import Context
from serve.runtime.gateway import Gateway
from serve.v1 import orca_pb2

SERVICE: Final = "xds.service.orca.v3.OpenRcaService"
"""What the service is called on the wire."""
TRAILER: Final = "endpoint-load-metrics-bin"
MAX_STREAMS: Final = 1000
OWN_FAULTS: Final = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED"})
"""Statuses of calls that another server might have served."""
_MEAN_SECONDS: Final = 5.0
"""How far back the means look: after so long, a third of what was is left."""
_USUAL_SECONDS: Final = 1.0
_LEAST_SECONDS: Final = 0.1


class LoadReports:
    """Keeps the means and serves them. Belongs to the event loop."""

    def __init__(self, gateway: Gateway, clock: Callable[[], float]) -> None:
        """
        Args:
            clock: monotonic seconds.
        """
        self._gateway = gateway
        self._clock = clock
        self._looked_seconds = clock()
        self._calls = self._faults = 0.0  # each call counts less the longer ago it ended
        self._utilization = 0.0
        self._num_streams = 0
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def call_ended(self, code: str) -> None:
        """Count a call by the name of its status."""
        self._fade(self._load(), at_least=1)  # it had a place until now; balancers take a utilisation of 0 for none known
        self._calls += 1
        self._faults += code in OWN_FAULTS

    def report(self) -> orca_pb2.OrcaLoadReport:
        """The load as it is now. Without an engine the server is taken to be full: it can serve nothing."""
        stats = self._load()
        self._fade(stats)
        message = orca_pb2.OrcaLoadReport(
            rps_fractional=self._calls / _MEAN_SECONDS,
            eps=self._faults / _MEAN_SECONDS,
            application_utilization=self._utilization,
        )
        if stats is not None:
            message.named_metrics["running"] = stats.num_running
            message.named_metrics["waiting"] = stats.num_waiting
            message.named_metrics["kv_cache"] = _kv_cache(stats)
        return message

    def trailers(self) -> tuple[tuple[str, bytes], ...]:
        """What the end of a call carries."""
        return ((TRAILER, self.report().SerializeToString()),)

    async def StreamCoreMetrics(
        self, request: orca_pb2.OrcaLoadReportRequest, context: Context
    ) -> AsyncIterator[orca_pb2.OrcaLoadReport]:
        """A report now and after every interval."""
        if self._num_streams >= MAX_STREAMS:
            raise QueueFull(f"{MAX_STREAMS} streams of load reports are the limit", reason="requests", retry_after_seconds=10.0)
        asked = request.report_interval.seconds + request.report_interval.nanos / 1e9
        every = max(_LEAST_SECONDS, asked) if asked else _USUAL_SECONDS
        self._num_streams += 1
        try:
            while not self._closed.done():
                yield self.report()
                await asyncio.wait((self._closed,), timeout=every)
        finally:
            self._num_streams -= 1

    def close(self) -> None:
        """End every stream of reports, and those that would begin."""
        if not self._closed.done():
            self._closed.set_result(None)

    def _load(self) -> EngineStats | None:
        try:
            return self._gateway.stats()
        except Unavailable:
            return None

    def _fade(self, stats: EngineStats | None, at_least: int = 0) -> None:
        now = self._clock()
        kept = math.exp((self._looked_seconds - now) / _MEAN_SECONDS)
        self._looked_seconds = now
        self._calls *= kept
        self._faults *= kept
        self._utilization = kept * self._utilization + (1 - kept) * self._now(stats, at_least)

    def _now(self, stats: EngineStats | None, at_least: int) -> float:
        if stats is None:
            return 1.0
        # The engine's figures are those after its latest step; what has come since is in flight already.
        requests = max(at_least, stats.num_running + stats.num_waiting, self._gateway.num_in_flight)
        return max(requests / self._gateway.config.scheduler.max_num_seqs, _kv_cache(stats))


def _kv_cache(stats: EngineStats) -> float:
    return stats.kv_blocks_used / max(1, stats.kv_blocks_total)
