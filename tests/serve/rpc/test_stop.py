"""A server that goes away says so: calls end with what they were to give or with UNAVAILABLE, never with CANCELLED."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from serve.rpc.hang_up import hang_up, say_goodbye
from serve.rpc.server import RpcServer
from serve.rpc.status import PUSHBACK_KEY
from serve.runtime.state import State
from serve.v1 import inference_pb2_grpc
from tests.serve.rpc.running import config_of, request, serving, state_is


@pytest.mark.parametrize("host", ["127.0.0.1", "unix"])
async def test_a_stop_among_many_calls_cancels_none(host: str, tmp_path: Path) -> None:
    codes: Counter[grpc.StatusCode] = Counter()

    async def call_until_nobody_is_there(stub: inference_pb2_grpc.InferenceStub) -> None:
        while True:
            code = await stub.Generate(request(tokens=1)).code()
            codes[code] += 1
            if code is not grpc.StatusCode.OK:
                return

    async with serving() as running:
        address = f"unix:{tmp_path}/socket" if host == "unix" else host
        server = RpcServer(running.gateway, running.metrics, config_of(rpc={"host": address}))
        async with grpc.aio.insecure_channel(await server.start(), [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            callers = [asyncio.ensure_future(call_until_nobody_is_there(stub)) for _ in range(60)]
            await running.until(lambda: codes[grpc.StatusCode.OK] > 60)
            await server.stop(5)
            await asyncio.gather(*callers)
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    assert codes[grpc.StatusCode.UNAVAILABLE] == 60


async def test_a_stop_waits_for_the_calls_that_handlers_have() -> None:
    async with serving() as running:
        server = RpcServer(running.gateway, running.metrics, config_of())
        async with grpc.aio.insecure_channel(await server.start(), [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            running.ranks.last_step = 3
            call = asyncio.ensure_future(stub.Generate(request(tokens=20)))
            await running.until_held()
            stopping = asyncio.ensure_future(server.stop(20))
            await asyncio.sleep(0)
            running.ranks.last_step = None
            assert len((await call).completions[0].token_ids) == 20
            await stopping


async def test_what_does_not_end_in_time_is_unavailable() -> None:
    async with serving() as running:
        server = RpcServer(running.gateway, running.metrics, config_of())
        async with grpc.aio.insecure_channel(await server.start(), [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            running.ranks.go.clear()
            call = stub.Generate(request())
            ended = asyncio.ensure_future(call.code())
            await running.until(lambda: running.gateway.num_in_flight == 1)
            await server.stop(0)
            assert await ended is grpc.StatusCode.UNAVAILABLE
            running.ranks.go.set()


def test_only_the_connections_of_the_address_are_closed() -> None:
    with contextlib.ExitStack() as open_:
        ours, theirs = (open_.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        one, other = (open_.enter_context(socket.create_connection(end.getsockname())) for end in (ours, theirs))
        accepted, kept = (open_.enter_context(end.accept()[0]) for end in (ours, theirs))
        accepted.sendall(b"the last word")
        hang_up(f"127.0.0.1:{ours.getsockname()[1]}")
        assert one.recv(100) == b"the last word"
        assert one.recv(100) == b"", "closed behind it"
        kept.sendall(b"still here")
        assert other.recv(100) == b"still here"


async def test_a_client_that_writes_at_the_end_reads_what_it_was_told() -> None:
    """Were the connection closed, its writes would fail, and clients look no further at what there is to read."""
    with contextlib.ExitStack() as open_:
        ours = open_.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = open_.enter_context(socket.create_connection(ours.getsockname()))
        accepted = open_.enter_context(ours.accept()[0])
        accepted.sendall(b"the last word")
        goodbye = asyncio.ensure_future(say_goodbye(f"127.0.0.1:{ours.getsockname()[1]}", 20))
        await asyncio.sleep(0)
        for _ in range(3):
            client.sendall(b"and another thing")
        assert client.recv(100) == b"the last word"
        assert client.recv(100) == b""
        assert not goodbye.done(), "the client is still there"
        client.close()
        accepted.close()  # as gRPC does with a connection whose client has gone
        await asyncio.wait_for(goodbye, 10)


async def test_a_client_that_does_not_read_is_not_waited_for() -> None:
    with contextlib.ExitStack() as open_:
        ours = open_.enter_context(socket.create_server(("127.0.0.1", 0)))
        open_.enter_context(socket.create_connection(ours.getsockname()))
        open_.enter_context(ours.accept()[0])
        await asyncio.wait_for(say_goodbye(f"127.0.0.1:{ours.getsockname()[1]}", 0.01), 10)


async def test_a_stop_lets_clients_read_and_write_until_they_close(tmp_path: Path) -> None:
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    ping = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"12345678"
    async with serving() as running:
        server = RpcServer(running.gateway, running.metrics, config_of(rpc={"host": f"unix:{tmp_path}/socket"}))
        await server.start()
        reader, writer = await asyncio.open_unix_connection(tmp_path / "socket")
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
        await reader.readuntil(b"\x00\x00\x00\x04\x01")  # it has acknowledged them, and has nothing more to write
        stopping = asyncio.ensure_future(server.stop(5))
        await reader.read()
        writer.write(ping)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        await stopping


async def test_nobody_waits_for_connections_that_came_after_the_goodbye() -> None:
    with contextlib.ExitStack() as open_:
        ours = open_.enter_context(socket.create_server(("127.0.0.1", 0)))
        first = open_.enter_context(socket.create_connection(ours.getsockname()))
        accepted = open_.enter_context(ours.accept()[0])
        goodbye = asyncio.ensure_future(say_goodbye(f"127.0.0.1:{ours.getsockname()[1]}", 1000))
        await asyncio.sleep(0)
        open_.enter_context(socket.create_connection(ours.getsockname()))
        late = open_.enter_context(ours.accept()[0])
        first.close()
        accepted.close()
        await asyncio.wait_for(goodbye, 10)
        late.sendall(b"it is written to as before")


async def test_a_client_that_stays_keeps_no_stop_waiting_and_a_stop_that_is_given_up_ends_the_server_too() -> None:
    async with serving() as running:
        for gives_up in (False, True):
            server = RpcServer(running.gateway, running.metrics, config_of(rpc={"admin_address": "127.0.0.1:0"}))
            port = int((await server.start()).rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)):
                stopping = asyncio.ensure_future(server.stop(60))
                if gives_up:
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    stopping.cancel()
                    await asyncio.gather(stopping, return_exceptions=True)
                else:
                    await asyncio.wait_for(stopping, 20)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))


@contextlib.contextmanager
def few_descriptors_left(left: int) -> Iterator[None]:
    """So many more may be opened, whatever is open already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/dev/fd"))
    with contextlib.ExitStack() as fill:
        while (filler := os.open(os.devnull, os.O_RDONLY)) < highest:  # the holes below
            fill.callback(os.close, filler)
        os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, (filler + left, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_are_closed_with_hardly_a_descriptor_left() -> None:
    with contextlib.ExitStack() as open_:
        ours = open_.enter_context(socket.create_server(("127.0.0.1", 0)))
        clients = [open_.enter_context(socket.create_connection(ours.getsockname())) for _ in range(8)]
        for _ in clients:
            open_.enter_context(ours.accept()[0])
        with few_descriptors_left(2):
            hang_up(f"127.0.0.1:{ours.getsockname()[1]}")
        for client in clients:
            client.settimeout(5.0)
            assert client.recv(1) == b""


async def test_a_server_without_a_descriptor_left_stops_and_says_what_it_left(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as running:
        server = RpcServer(running.gateway, running.metrics, config_of())
        address = await server.start()
        with few_descriptors_left(0):
            await server.stop(0)
        assert f"connections at {address} are left to gRPC to close" in caplog.text
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))


RETRIES = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 2,
                    "initialBackoff": "0.001s",
                    "maxBackoff": "0.001s",
                    "backoffMultiplier": 1,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)


async def test_retries_of_a_call_that_a_draining_server_refused_come_when_it_says() -> None:
    async with serving() as running:
        await running.gateway.drain()
        await running.until(state_is(running, State.DRAINING))
        async with grpc.aio.insecure_channel(running.address, [("grpc.service_config", RETRIES)]) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request())  # type: ignore[no-untyped-call]
            began = time.monotonic()
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert running.count("Generate", "UNAVAILABLE") == 2, "it was tried again"
            told_seconds = int(dict(await call.trailing_metadata())[PUSHBACK_KEY]) / 1000
            assert time.monotonic() - began >= told_seconds > 0
