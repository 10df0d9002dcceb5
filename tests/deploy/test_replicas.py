"""Several servers behind HAProxy with our configuration, and behind gRPC's own policies by our service config."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from serve.client import AsyncClient
from serve.v1 import inference_pb2_grpc
from tests.deploy.tools import needs, run
from tests.serve.rpc.running import RunningServer, request, serving

pytestmark = pytest.mark.deploy

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ALONE = (("grpc.use_local_subchannel_pool", 1),)


@contextlib.asynccontextmanager
async def haproxy(servers: list[RunningServer], folder: Path) -> AsyncIterator[str]:
    """The configuration as it is, but for its addresses."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics = one.getsockname()[1], other.getsockname()[1]
    text = (DEPLOY / "haproxy" / "haproxy.cfg").read_text()
    for number, server in enumerate(servers, 1):
        text = text.replace(f"10.0.0.{number}:50051", server.address)
    assert "10.0.0" not in text
    file = folder / "haproxy.cfg"
    file.write_text(text.replace("127.0.0.1:50050", f"127.0.0.1:{port}").replace("127.0.0.1:8405", f"127.0.0.1:{metrics}"))
    process = await asyncio.create_subprocess_exec("haproxy", "-db", "-f", str(file))
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


def counts(servers: list[RunningServer]) -> list[float]:
    return [server.count("Generate", "OK") for server in servers]


@needs("haproxy")
def test_haproxy_takes_its_configuration() -> None:
    run("haproxy", "-c", "-f", "haproxy.cfg", folder=DEPLOY / "haproxy")


@needs("haproxy")
async def test_haproxy_spreads_calls_keeps_sessions_together_and_loses_none_when_a_server_drains(tmp_path: Path) -> None:
    async with serving() as one, serving() as other, serving() as third, haproxy([one, other, third], tmp_path) as address:
        servers = [one, other, third]
        async with AsyncClient(address, retries=6, timeout=60, options=ALONE) as client:
            await client.wait_until_serving()

            async def ask(count: int, session: str = "") -> None:
                for _ in range(count):
                    await client.generate([5, 6], max_new_tokens=2, ignore_eos=True, session=session)

            await ask(30)
            assert min(counts(servers)) >= 30 / 3 * 0.85
            for session in ("a", "b", "c", "d"):
                before = counts(servers)
                await ask(5, session)
                assert sorted(now - then for now, then in zip(counts(servers), before, strict=True)) == [0, 0, 5]
            begins = asyncio.create_task(other.gateway.drain())
            await ask(30)
            await begins
            before = counts(servers)[1]
            await ask(10)
            assert counts(servers)[1] == before, "it takes no more"


async def test_any_grpc_client_balances_and_tries_again_by_our_service_config() -> None:
    async with serving() as one, serving() as other:
        options = [*ALONE, ("grpc.service_config", (DEPLOY / "service-config.json").read_text())]
        async with grpc.aio.insecure_channel(f"ipv4:{one.address},{other.address}", options) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            async with asyncio.timeout(60):
                while min(counts([one, other])) < 3:
                    await stub.Generate(request(), wait_for_ready=True)
            await one.gateway.drain()
            for _ in range(20):
                await stub.Generate(request())
