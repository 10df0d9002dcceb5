"""``grpc.health.v1``, following the gateway's state. Watch streams end when the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Final

from grpc_health.v1 import health_pb2

from serve.errors import NotFound, QueueFull
from serve.rpc.context import Context
from serve.runtime.gateway import Gateway
from serve.runtime.state import State

MAX_WATCHERS: Final = 1000
LIVENESS: Final = "liveness"
"""The name under which the process itself is asked for, whether or not its model is loaded."""
_LOOK_SECONDS: Final = 1.0
"""How often who watches the process's life has it looked at."""


class HealthService:
    """SERVING exactly while the gateway is, for the whole server (``""``) and for each of its services.

    ``liveness`` is SERVING for as long as the process works at all: while it loads, drains and starts ranks again too.
    """

    def __init__(self, gateway: Gateway, services: Iterable[str]) -> None:
        self._gateway = gateway
        self._names = frozenset({"", LIVENESS, *services})
        self._is_serving = gateway.state is State.SERVING
        self._closed = False
        self._num_watchers = 0
        self._change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gateway.on_state_change(self._on_state)

    def close(self) -> None:
        """NOT_SERVING from now on; every Watch stream says so and ends."""
        self._is_serving = False
        self._closed = True
        self._tell()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """The status now; NOT_FOUND for a service that is not here."""
        if request.service not in self._names:
            raise NotFound(f"there is no service {request.service[:64]!r}")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        """The status of every service."""
        statuses = {name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in self._names}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now and after every change; SERVICE_UNKNOWN for a service that is not here."""
        if self._num_watchers >= MAX_WATCHERS:
            raise QueueFull(f"{MAX_WATCHERS} health watchers are the limit", reason="requests", retry_after_seconds=10.0)
        self._num_watchers += 1
        try:
            told = None
            while True:
                change, status = self._change, self._status(request.service)
                if status != told:
                    yield health_pb2.HealthCheckResponse(status=status)
                    told = status
                if self._closed:
                    return
                await asyncio.wait((change,), timeout=_LOOK_SECONDS if request.service == LIVENESS else None)
        finally:
            self._num_watchers -= 1

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service not in self._names:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        is_well = self._gateway.is_live and not self._closed if service == LIVENESS else self._is_serving
        return health_pb2.HealthCheckResponse.SERVING if is_well else health_pb2.HealthCheckResponse.NOT_SERVING

    def _on_state(self, state: State) -> None:
        self._is_serving = state is State.SERVING and not self._closed
        self._tell()

    def _tell(self) -> None:
        change, self._change = self._change, asyncio.get_running_loop().create_future()
        change.set_result(None)
