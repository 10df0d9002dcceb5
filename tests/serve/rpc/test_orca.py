"""Load reports, and that gRPC's own balancing goes by them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from serve.rpc import orca
from serve.rpc.tokens import add_token
from serve.runtime.gateway import Gateway
from serve.v1 import inference_pb2_grpc
from serve.v1.orca_pb2 import OrcaLoadReport, OrcaLoadReportRequest
from tests.serve.rpc.running import RunningServer, config_of, request, serving


def reports(channel: Any, every_ms: int = 100, **with_: Any) -> Any:
    """The stream of reports, called as other software does."""
    call = channel.unary_stream(
        "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics",
        request_serializer=OrcaLoadReportRequest.SerializeToString,
        response_deserializer=OrcaLoadReport.FromString,
    )
    interval = Duration()
    interval.FromMilliseconds(every_ms)
    return call(OrcaLoadReportRequest(report_interval=interval), **with_)


async def test_the_end_of_a_call_carries_a_report() -> None:
    """Read on the server's side: gRPC's clients keep the trailer to themselves."""
    async with serving() as server:
        await server.inference.Generate(request())
        kept = orca.LoadReports(server.gateway, lambda: 0.0)
        kept.call_ended("OK")
        ((key, value),) = kept.trailers()
        assert key == "endpoint-load-metrics-bin"
        told = OrcaLoadReport.FromString(value)
        assert told.rps_fractional > 0
        assert told.eps == 0
        assert set(told.named_metrics) == {"running", "waiting", "kv_cache"}


async def test_the_stream_tells_of_requests_that_run_and_ends_with_the_server() -> None:
    async with serving(scheduler={"max_num_seqs": 2}) as server:
        stream = reports(server.channel)
        assert (await stream.read()).application_utilization == 0, "nothing was asked of it yet"
        server.ranks.go.clear()
        held = [server.inference.Generate(request()) for _ in range(4)]
        async with asyncio.timeout(20):
            while (await stream.read()).application_utilization <= 0.1:
                pass
        server.ranks.go.set()
        await asyncio.gather(*held)
        async with asyncio.timeout(20):
            while (await stream.read()).rps_fractional == 0:
                pass
        channel = grpc.aio.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)])
        last = reports(channel, every_ms=600_000)
        await last.read()
    async with channel:
        assert await last.code() is grpc.StatusCode.OK, "the server ended it, and did not wait for it"


@pytest.mark.parametrize("orca_is", ["auto", "on", "off"])
async def test_with_tokens_reports_are_for_those_who_asked_for_them(tmp_path: Path, orca_is: str) -> None:
    file = tmp_path / "tokens.json"
    add_token(file, "a", scopes=("generate",), expires=None, given={})
    async with serving(rpc={"tokens": str(file), "orca": orca_is}) as server:
        stream = reports(server.channel)
        if orca_is == "on":
            assert await stream.read() is not grpc.aio.EOF, "gRPC's policy has no token to send"
            stream.cancel()
        else:
            assert await stream.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_means_fade_alike_so_that_an_idle_server_keeps_its_weight() -> None:
    class Stub:
        config = config_of(scheduler={"max_num_seqs": 4})
        running = 2
        num_in_flight = 0

        def stats(self) -> Any:
            names = {"num_running": self.running, "num_waiting": 1, "kv_blocks_used": 0, "kv_blocks_total": 8}
            return type("Stats", (), names)

    now, gateway = [0.0], Stub()
    kept = orca.LoadReports(gateway, lambda: now[0])  # type: ignore[arg-type]
    for code in ("OK", "INVALID_ARGUMENT", "UNAVAILABLE", "OK") * 10:
        now[0] += 0.25
        kept.call_ended(code)
    busy = kept.report()
    assert 0.5 < busy.application_utilization < 0.75
    assert busy.eps == pytest.approx(busy.rps_fractional / 4, rel=0.1)
    gateway.running = -1  # nothing runs or waits
    now[0] += 20
    idle = kept.report()
    assert 0 < idle.application_utilization < 0.02
    assert idle.rps_fractional / idle.application_utilization == pytest.approx(
        busy.rps_fractional / busy.application_utilization, rel=1e-6
    )


async def test_a_server_without_an_engine_counts_as_full() -> None:
    async with serving(wait=False, prepare=lambda ranks: ranks.loaded.clear()) as server:
        assert isinstance(server.gateway, Gateway)
        stream = reports(server.channel)
        async with asyncio.timeout(20):
            while (await stream.read()).application_utilization < 0.05:
                pass
        server.ranks.loaded.set()
        await server.gateway.until_serving()


@contextlib.asynccontextmanager
async def occupied(server: RunningServer, streams: int) -> AsyncIterator[None]:
    """Other clients keep so many long requests running there."""

    async def again() -> None:
        while True:
            await server.inference.Generate(request(tokens=200))

    tasks = [asyncio.create_task(again()) for _ in range(streams)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("beside_calls", [True, False])
async def test_grpcs_own_policy_gives_the_busy_one_of_two_servers_less(beside_calls: bool) -> None:
    """By the stream, and by the end of calls."""
    policy = {"enableOobLoadReport": beside_calls, "oobReportingPeriod": "0.1s"}
    weighted = {"weighted_round_robin": {**policy, "blackoutPeriod": "0s", "weightUpdatePeriod": "0.1s"}}
    async with (
        serving(scheduler={"max_num_seqs": 4}, rpc={"host": "127.0.0.1"}) as busy,
        serving(scheduler={"max_num_seqs": 64}, rpc={"host": "127.0.0.1"}) as free,
    ):
        options = [
            ("grpc.service_config", json.dumps({"loadBalancingConfig": [weighted]})),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        target = f"ipv4:{busy.address},{free.address}"
        async with occupied(busy, 4), grpc.aio.insecure_channel(target, options) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)

            async def share_of_free(calls: int) -> float:
                before = free.count("Generate", "OK")
                for _ in range(calls):
                    await stub.Generate(request(tokens=1))
                return (free.count("Generate", "OK") - before) / calls

            async with asyncio.timeout(20):
                while await share_of_free(20) < 0.75:
                    pass
