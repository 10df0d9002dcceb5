"""The gRPC server: addresses, options, services."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final
from wsgiref.types import WSGIApplication

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2

from host.endpoint import Wrap
from serve.config import ServerConfig
from serve.errors import ConfigError, QueueFull
from serve.listening import RpcConfig
from serve.metrics import Metrics
from serve.rpc.admin_service import AdminService
from serve.rpc.audit import Audit
from serve.rpc.bounds import request_bounds
from serve.rpc.certificates import Certificates
from serve.rpc.guard import Guard
from serve.rpc.hang_up import hang_up, say_goodbye
from serve.rpc.health import HealthService
from serve.rpc.identity import Identities
from serve.rpc.methods import Calls, Count, bind
from serve.rpc.model import Models
from serve.rpc.model_service import ModelService
from serve.rpc.orca import SERVICE, LoadReports
from serve.rpc.reflection import reflection_handlers
from serve.rpc.scraping import guarded
from serve.rpc.service import InferenceService
from serve.rpc.text_service import TokenizerService
from serve.runtime.gateway import Gateway
from serve.tracing.seam import Tracing
from serve.v1 import admin_pb2, inference_pb2, models_pb2, orca_pb2, tokenizer_pb2

_log = logging.getLogger(__name__)

_GOODBYE_SECONDS: Final = 1.0
"""How long clients have to read what was written to them, and to close their connections."""

INFERENCE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
TOKENIZER: Final = tokenizer_pb2.DESCRIPTOR.services_by_name["Tokenizer"]
MODELS: Final = models_pb2.DESCRIPTOR.services_by_name["Models"]
ADMIN: Final = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
ORCA: Final = orca_pb2.DESCRIPTOR.services_by_name["OpenRca"]
HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"]


def server_options(config: RpcConfig) -> list[tuple[str, int]]:
    """gRPC's own settings. There is no ``maximum_concurrent_rpcs``: it would refuse health checks of a busy server too;
    admission is the engine's."""
    return [
        ("grpc.so_reuseport", 0),  # or a second server would silently share the port
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", 8192),
        ("grpc.absolute_max_metadata_size", 16384),
        ("grpc.max_concurrent_streams", config.max_streams),
        # A client that vanished without a word is found within 40 seconds, and its blocks are freed.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients may ping every 10 seconds. (The name with ``recv`` in it, often copied, does nothing.)
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.server_handshake_timeout_ms", 10_000),
        # One connection more is closed at once. An old one is told to go, and its calls may end in their own time; the client
        # comes back on a new one, maybe to another server.
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        ("grpc.max_connection_idle_ms", round(config.connection_idle_seconds * 1000)),
        ("grpc.max_connection_age_ms", round(config.connection_age_seconds * 1000)),
        ("grpc.enable_channelz", 0),
    ]


class RpcServer:
    """Owns the listening sockets and the services on them. Belongs to the event loop it is started on."""

    def __init__(
        self,
        gateway: Gateway,
        metrics: Metrics,
        config: ServerConfig,
        clock: Callable[[], float] = time.monotonic,
        tracing: Tracing | None = None,
    ) -> None:
        """
        Args:
            clock: monotonic seconds, the same clock as the engine's.
            tracing: told of every call but health checks and reflection; nobody is without it.

        Raises:
            ConfigError: the files of ``rpc.tls_*`` or ``rpc.tokens`` cannot be used.
        """
        self._gateway = gateway
        self._metrics = metrics
        self._config = config
        self._clock = clock
        self._tracing = tracing
        self._certificates = self._read_certificates()
        tokens = config.rpc.tokens
        self.identities = Identities(tokens, refused=metrics.guard.tokens_refused, clock=clock) if tokens else None
        """Whose tokens count; ``None`` where everyone may call everything."""
        self._audit = self._open_audit()
        self._servers: dict[str, grpc.aio.Server] = {}  # by the address that was bound
        self._calls = Calls()
        self._health: HealthService | None = None
        self._reports: LoadReports | None = None

    def _read_certificates(self) -> Certificates | None:
        metrics, rpc = self._metrics, self._config.rpc
        if not rpc.tls_cert:
            return None
        return Certificates(rpc, served=metrics.guard.certificate_served, refused=metrics.guard.certificate_refused)

    def _open_audit(self) -> Audit | None:
        rpc = self._config.rpc
        if not rpc.audit_log and not rpc.access_log_sample:
            return None
        as_text = rpc.audit_format == "text"
        lost = self._metrics.guard.audit_line_lost
        return Audit(file=rpc.audit_log, as_text=as_text, sample=rpc.access_log_sample, clock=self._clock, lost=lost)

    @property
    def wrap(self) -> Wrap | None:
        """Makes TLS of the metrics port's connections; ``None`` where the gRPC port speaks none either."""
        return None if self._certificates is None else self._certificates.wrap

    def guard_of_metrics(self, app: WSGIApplication) -> WSGIApplication:
        """What answers the metrics port, for those alone who may read them."""
        return app if self.identities is None else guarded(app, self.identities)

    async def start(self) -> str:
        """Listen, whatever state the gateway is in.

        Returns:
            The address that was bound, ``host:port`` or ``unix:/path``.

        Raises:
            ConfigError: an address is taken or cannot be bound.
        """
        rpc = self._config.rpc
        shares_port = _shares_port(rpc)
        public = {INFERENCE: None, TOKENIZER: None, MODELS: None}
        names = [service.full_name for service in public]
        self._health = HealthService(self._gateway, [*names, ADMIN.full_name] if shares_port else names)
        self._reports = LoadReports(self._gateway, self._clock) if _reports_load(rpc) else None
        models = Models(self._gateway)
        inference = InferenceService(self._gateway, models, self._metrics, self._clock)
        servicers: dict[ServiceDescriptor, object] = {
            INFERENCE: inference,
            TOKENIZER: TokenizerService(models),
            MODELS: ModelService(models),
        }
        admin: dict[ServiceDescriptor, object] = {ADMIN: AdminService(self._gateway, inference.abort)}
        try:
            bound = await self._listen("rpc.port", _address(rpc), servicers | admin if shares_port else servicers)
            if rpc.admin_address not in ("auto", "off"):
                await self._listen("rpc.admin_address", rpc.admin_address, admin)
        except BaseException:
            await self.stop(0)
            raise
        return bound

    async def stop(self, grace: float) -> None:
        """End health watches, give the calls that handlers have ``grace`` seconds, and close every connection, once its client
        has read what was written to it or, at most, a second or ``grace`` later.

        Calls that come while others are waited for are answered; one that comes later, or that no handler has seen yet, ends
        with UNAVAILABLE.
        """
        if self._health is not None:
            self._health.close()
        if self._reports is not None:
            self._reports.close()
        await self._calls.until_over(grace)
        try:
            await asyncio.gather(*(_tell(address, min(grace, _GOODBYE_SECONDS)) for address in self._servers))
        finally:
            while self._servers:
                address, server = self._servers.popitem()
                try:
                    hang_up(address)
                except OSError as error:
                    _log.warning("connections at %s are left to gRPC to close: %s", address, error)
                await server.stop(0)  # begins before anything else can run here
        if self._audit is not None:
            await asyncio.to_thread(self._audit.close)

    async def _listen(self, field: str, address: str, servicers: dict[ServiceDescriptor, object]) -> str:
        assert self._health is not None
        guards = [Guard(self.identities, self._metrics.request_ended, self._audit)] if self.identities is not None else []
        server = grpc.aio.server(interceptors=guards, options=server_options(self._config.rpc))
        limits, reports = self._config.admission, self._reports
        most_bytes = limits.max_waiting_bytes
        bound_to = partial(bind, bounds=request_bounds(limits), most_waiting_bytes=most_bytes, calls=self._calls)
        handlers = [
            bound_to(
                service,
                servicer,
                self._count(service),
                refused=self._metrics.rejected if service is INFERENCE else _not_counted,
                tracing=self._tracing,
                books=self._audit,
                trailers=reports.trailers if reports is not None and service is INFERENCE else None,
            )
            for service, servicer in servicers.items()
        ]
        if reports is not None and INFERENCE in servicers:
            handlers.append(bound_to(ORCA, reports, None, name=SERVICE))
        handlers.append(bound_to(HEALTH, self._health, None))
        if _has_reflection(self._config.rpc):
            handlers += reflection_handlers(_names([*servicers, HEALTH]), self._calls, most_bytes)
        server.add_generic_rpc_handlers(handlers)
        bound = _bind(server, field, address, self._certificates)
        await server.start()
        self._servers[bound] = server
        return bound

    def _count(self, service: ServiceDescriptor) -> Count:
        """What counts the service's calls: the metrics, and the load reports where they tell of it."""
        count, reports = self._metrics.request_ended, self._reports
        if reports is None or service is not INFERENCE:
            return count

        def counted(method: str, code: str) -> None:
            count(method, code)
            reports.call_ended(code)

        return counted


async def _tell(address: str, at_most_seconds: float) -> None:
    """Say goodbye, if there are descriptors for it."""
    with contextlib.suppress(OSError):
        await say_goodbye(address, at_most_seconds)


def _not_counted(refusal: QueueFull) -> None:
    """A request for which nothing is generated or scored: its call alone is counted."""


def _names(services: Iterable[ServiceDescriptor]) -> list[str]:
    return [service.full_name for service in services]


def _shares_port(rpc: RpcConfig) -> bool:
    return rpc.admin_address == "auto" and rpc.is_loopback


def _has_reflection(rpc: RpcConfig) -> bool:
    return rpc.reflection == "on" or (rpc.reflection == "auto" and rpc.is_loopback)


def _reports_load(rpc: RpcConfig) -> bool:
    return rpc.orca == "on" or (rpc.orca == "auto" and not rpc.tokens)


def _address(rpc: RpcConfig) -> str:
    if rpc.host.startswith("unix:"):
        return rpc.host
    host = f"[{rpc.host}]" if ":" in rpc.host and not rpc.host.startswith("[") else rpc.host
    return f"{host}:{rpc.port}"


def _bind(server: grpc.aio.Server, field: str, address: str, certificates: Certificates | None) -> str:
    if address.startswith("unix:"):
        _require_free(field, address.removeprefix("unix:").removeprefix("//"))
    try:
        if certificates is None or address.startswith("unix:"):
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, certificates.credentials())
    except RuntimeError as error:
        port = 0
        cause: Exception | None = error
    else:
        cause = None
    if port == 0:
        raise ConfigError(
            f"{field}: {address} cannot be bound; another process may have it, or the host is not ours"
        ) from cause
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


def _require_free(field: str, path: str) -> None:
    """gRPC deletes a socket file before it binds, also one that another server is listening on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return
    raise ConfigError(f"{field}: another process listens on {path}")
