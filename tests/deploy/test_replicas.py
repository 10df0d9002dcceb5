"""Several servers behind HAProxy and Envoy with our configurations, and behind gRPC's own policies by our service config."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest

from serve.client import AsyncClient, TesseraError
from serve.v1 import inference_pb2_grpc
from tests.deploy.balancers import DEPLOY, ENVOY, Balancer, envoy, haproxy, needs_envoy, needs_haproxy
from tests.deploy.holding import HELD, holding
from tests.deploy.tools import run
from tests.serve.fake_executor import fake_facts
from tests.serve.rpc.running import RunningServer, request, serving

pytestmark = pytest.mark.deploy

ALONE = (("grpc.use_local_subchannel_pool", 1),)


EACH = pytest.mark.parametrize(
    "balancer", [pytest.param(haproxy, marks=needs_haproxy), pytest.param(envoy, marks=needs_envoy)], ids=["haproxy", "envoy"]
)


def counts(servers: list[RunningServer]) -> list[float]:
    return [server.count("Generate", "OK") for server in servers]


@needs_haproxy
def test_haproxy_takes_its_configuration() -> None:
    run("haproxy", "-c", "-f", "haproxy.cfg", folder=DEPLOY / "haproxy")


@needs_envoy
def test_envoy_takes_its_configuration() -> None:
    run(str(ENVOY), "--mode", "validate", "-c", "envoy.yaml", folder=DEPLOY / "envoy")


@EACH
async def test_calls_are_spread_sessions_kept_together_and_none_lost_when_a_server_drains(
    balancer: Balancer, tmp_path: Path
) -> None:
    async with serving() as one, serving() as other, serving() as third, balancer([one, other, third], tmp_path) as address:
        servers = [one, other, third]
        async with AsyncClient(address, retries=6, timeout=60, options=ALONE) as client:
            await client.wait_until_serving()

            async def ask(count: int, session: str = "") -> None:
                for _ in range(count):
                    await client.generate([5, 6], max_new_tokens=2, ignore_eos=True, session=session)

            await ask(30)
            # One call at a time finds all servers idle: HAProxy takes them in turns, Envoy draws one.
            assert min(counts(servers)) >= (30 / 3 * 0.85 if balancer is haproxy else 1)
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


@EACH
async def test_a_server_that_is_gone_costs_no_call_and_balancers_say_unavailable(balancer: Balancer, tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as lives:
        servers = [await lives.enter_async_context(serving()) for _ in range(2)]
        async with contextlib.AsyncExitStack() as short_life:
            servers.append(await short_life.enter_async_context(serving()))
            address = await lives.enter_async_context(balancer(servers, tmp_path))
            client = await lives.enter_async_context(AsyncClient(address, retries=0, timeout=60, options=ALONE))
            await client.wait_until_serving()
        for number in range(30):
            await client.generate([5, 6], max_new_tokens=2, ignore_eos=True, session=f"session-{number}")
        for server in servers[:2]:
            await server.gateway.drain()
        async with asyncio.timeout(60):
            said_by = ""
            while not said_by.endswith(
                ("no server answers)", "no healthy upstream)")
            ):  # until the balancer has heard it; before, the servers say so themselves
                with pytest.raises(TesseraError) as said:
                    await client.generate([5, 6], max_new_tokens=2)
                assert said.value.code == "UNAVAILABLE"
                said_by = said.value.message
                print(said_by)
        with pytest.raises(TesseraError) as said:
            await anext(client.stream([5, 6], max_new_tokens=2))
        assert said.value.code == "UNAVAILABLE"


async def code_of(stream: Any) -> str:
    """The code with which a stream ends."""
    with contextlib.suppress(grpc.RpcError):
        while await stream.read() is not grpc.aio.EOF:
            pass
    return (await stream.code()).name


LONG = 30_000
"""Ids of a prompt whose request is larger than the buffer that HAProxy has by default."""


@EACH
async def test_a_server_that_is_killed_costs_only_the_streams_that_it_had_begun(balancer: Balancer, tmp_path: Path) -> None:
    facts = {"facts": fake_facts(max_model_len=2 * LONG, num_blocks=LONG), "admission": {"max_queued_tokens": 20 * LONG}}
    async with contextlib.AsyncExitStack() as lives:
        others = [await lives.enter_async_context(serving(**facts)) for _ in range(2)]
        held = await lives.enter_async_context(holding())
        address = await lives.enter_async_context(balancer([*others, held], tmp_path))
        channel = await lives.enter_async_context(grpc.aio.insecure_channel(address, ALONE))
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        calls: list[Any] = []
        streams: list[Any] = []
        reached: Counter[str] = Counter()

        def ask() -> None:
            calls.extend(stub.Generate(request(ids, 2), timeout=60, wait_for_ready=True) for ids in ((5, 6), (5,) * LONG))
            streams.append(stub.GenerateStream(request((5, 6), 2), timeout=60, wait_for_ready=True))

        async with asyncio.timeout(60):
            while reached["Generate"] < 4 or reached["GenerateStream"] < 2:
                ask()
                with contextlib.suppress(TimeoutError):
                    reached[await asyncio.wait_for(held.next_call(), 0.2)] += 1
        begun = [await stream.read() for stream in streams]
        await held.kill()
        codes = {((await call.code()).name, number % 2) for number, call in enumerate(calls)}
        assert codes == {("OK", 0), ("OK", 1)}, "short prompts and long ones"
        for first, stream in zip(begun, streams, strict=True):
            assert (first.request_id == HELD) == (await code_of(stream) != "OK")


@EACH
async def test_a_call_of_many_requests_passes_while_its_caller_writes(balancer: Balancer, tmp_path: Path) -> None:
    async with serving() as one, balancer([one] * 3, tmp_path) as address:
        async with AsyncClient(address, options=ALONE) as client:
            await client.wait_until_serving()
        async with grpc.aio.insecure_channel(address, ALONE) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).GenerateBatch(timeout=60)
            for _ in range(2):
                await call.write(request())
                assert (await call.read()) is not grpc.aio.EOF, "it is answered before there is an end of requests"
            await call.done_writing()


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
