"""Addresses, ports and what is reachable where."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.attacks import END_HEADERS, GENERATE, HEADERS, PREFACE, RESET, SETTINGS, call, frame
from serve.config import RpcConfig
from serve.errors import ConfigError
from serve.rpc.server import RpcServer, server_options
from serve.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, models_pb2, tokenizer_pb2
from tests.serve.rpc.running import config_of, request, serving
from tests.serve.rpc.test_certificates import make_pair
from tests.serve.rpc.test_tokens import bearer, code_of, make


async def start_another(running: object, **rpc: object) -> RpcServer:
    """A second server on the first one's gateway."""
    server = RpcServer(running.gateway, running.metrics, config_of(rpc=rpc))  # type: ignore[attr-defined]
    await server.start()
    return server


async def test_a_taken_port_is_refused_by_name() -> None:
    async with serving() as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"rpc\.port.*{port}"):
            await start_another(server, port=port)


async def test_a_unix_socket_serves_and_is_not_taken_from_its_owner(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/tessera.sock"
    async with serving(rpc={"host": address}) as server:
        assert server.address == address
        assert len((await server.inference.Generate(request())).completions[0].token_ids) == 4
        await server.admin.GetLoad(admin_pb2.GetLoadRequest())  # a local socket is as private as loopback
        with pytest.raises(ConfigError, match="another process listens"):
            await start_another(server, host=address)


async def test_admin_is_off_when_told_so() -> None:
    async with serving(rpc={"admin_address": "off"}) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.admin.GetLoad(admin_pb2.GetLoadRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_admin_on_an_address_of_its_own_has_nothing_else(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/admin.sock"
    async with serving(rpc={"admin_address": address}) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.admin.GetLoad(admin_pb2.GetLoadRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        async with grpc.aio.insecure_channel(address) as channel:
            load = await admin_pb2_grpc.AdminStub(channel).GetLoad(admin_pb2.GetLoadRequest())  # type: ignore[no-untyped-call]
            assert load.state == admin_pb2.SERVER_STATE_SERVING
            generate = channel.unary_unary("/serve.v1.Inference/Generate")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("more", [{}, {"tokens": "t.json"}, {"tls_cert": "a", "tls_key": "b"}])
def test_a_public_admin_address_is_refused_unless_tls_hides_it_and_it_is_known_who_calls(more: dict[str, str]) -> None:
    with pytest.raises(
        ConfigError, match=r"rpc\.admin_address is '0\.0\.0\.0:1'; it must .* rpc\.tokens or rpc\.tls_client_ca, or"
    ):
        RpcConfig(admin_address="0.0.0.0:1", **more)
    for private in ("auto", "off", "127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/tmp/admin.sock"):
        assert RpcConfig(admin_address=private, **more).admin_address == private
    assert RpcConfig(admin_address="0.0.0.0:1", insecure_public=True).admin_address == "0.0.0.0:1"
    tls = {"tls_cert": "a", "tls_key": "b"}
    for who in ("tokens", "tls_client_ca"):
        assert RpcConfig(admin_address="0.0.0.0:1", **tls, **{who: "file"}).admin_address == "0.0.0.0:1"


async def test_a_public_admin_address_answers_over_tls_to_the_scope_admin_alone(tmp_path: Path) -> None:
    certificate, key = make_pair(tmp_path, "server")
    friend, file = make_pair(tmp_path, "friend"), tmp_path / "tokens.json"
    admin, writer = make(file, "operator", "admin"), make(file, "writer", "generate")
    files = {"tls_cert": str(certificate), "tls_key": str(key), "tls_client_ca": str(friend[0]), "tokens": str(file)}
    async with serving() as running:
        server = await start_another(running, port=0, admin_address="0.0.0.0:0", **files)
        try:
            (address,) = (bound for bound in server._servers if bound.startswith("0.0.0.0:"))
            where = f"localhost:{address.rpartition(':')[2]}"
            ask = admin_pb2.GetLoadRequest()
            with secure(where, certificate, friend) as stub:
                assert (await stub.GetLoad(ask, **bearer(admin))).state == admin_pb2.SERVER_STATE_SERVING
                assert await code_of(stub.GetLoad(ask, **bearer(writer))) is grpc.StatusCode.PERMISSION_DENIED
                assert await code_of(stub.GetLoad(ask, timeout=20)) is grpc.StatusCode.UNAUTHENTICATED
            with secure(where, certificate, None) as stub:
                assert await code_of(stub.GetLoad(ask, **bearer(admin))) is grpc.StatusCode.UNAVAILABLE
            async with grpc.aio.insecure_channel(where) as channel:
                stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]
                assert await code_of(stub.GetLoad(ask, **bearer(admin))) is grpc.StatusCode.UNAVAILABLE
        finally:
            await server.stop(0)


@contextlib.contextmanager
def secure(where: str, roots: Path, client: tuple[Path, Path] | None) -> Iterator[Any]:
    pair = {} if client is None else {"certificate_chain": client[0].read_bytes(), "private_key": client[1].read_bytes()}
    credentials = grpc.ssl_channel_credentials(roots.read_bytes(), **pair)
    channel = grpc.aio.secure_channel(where, credentials, [("grpc.use_local_subchannel_pool", 1)])
    yield admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]


async def test_a_question_to_reflection_that_cannot_be_read_is_the_clients_mistake() -> None:
    async with serving() as server:
        for version in ("v1", "v1alpha"):
            method = server.channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
            call = method(iter([b"\xff\xff\xff\xff"]))
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_reflection_is_off_when_told_so() -> None:
    async with serving(rpc={"reflection": "off"}) as server:
        call = server.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_options_are_those_that_grpc_knows() -> None:
    options = dict(server_options(config_of().rpc))
    assert options["grpc.so_reuseport"] == 0
    assert options["grpc.max_receive_message_length"] == 8 * 1024 * 1024
    assert "grpc.http2.min_ping_interval_without_data_ms" in options


async def until_closed(address: str) -> None:
    """Connect, and return when the server closes the connection."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionResetError):
                while await reader.read(1024):
                    pass
    finally:
        writer.close()


async def test_one_connection_too_many_is_closed_and_the_others_go_on() -> None:
    async with serving(rpc={"max_connections": 2}) as server:
        await server.inference.Generate(request())
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read(1), "the second is taken"
        await until_closed(server.address)
        await server.inference.Generate(request())
        writer.close()


async def test_one_connection_has_no_more_calls_at_once_than_it_may() -> None:
    opened = b"".join(frame(HEADERS, END_HEADERS, stream, call(GENERATE)) for stream in range(1, 100, 2))
    async with serving(rpc={"max_streams": 8}) as server:
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(PREFACE + frame(SETTINGS, 0, 0) + opened)
        refused = 0
        async with asyncio.timeout(20):
            while refused < 50 - 8:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3], "big"))
                refused += head[3] == RESET
        writer.close()
        await server.inference.Generate(request())


async def test_a_connection_without_a_call_is_closed() -> None:
    async with serving(rpc={"connection_idle_seconds": 1}) as server:
        await until_closed(server.address)
        await server.inference.Generate(request())


async def test_an_old_connection_takes_no_new_calls_and_keeps_those_it_has() -> None:
    async with serving(rpc={"connection_age_seconds": 1}) as server:
        server.ranks.last_step = 3
        call = asyncio.ensure_future(server.inference.Generate(request(tokens=9)))
        await server.until_held()
        async with asyncio.timeout(20):
            await server.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        server.ranks.last_step = None
        assert len((await call).completions[0].token_ids) == 9
        await server.inference.Generate(request())


async def test_long_texts_do_not_keep_other_calls_waiting() -> None:
    async with serving() as server:
        long = server.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text="many words " * 11_000))
        waiting = asyncio.ensure_future(long.code())
        answers = 0
        while not waiting.done():
            await server.models.ListModels(models_pb2.ListModelsRequest())
            answers += 1
        assert await waiting is grpc.StatusCode.OK
        assert answers > 3


def test_every_field_and_message_of_the_contract_has_a_comment() -> None:
    root = Path(__file__).resolve().parents[3] / "protos" / "serve" / "v1"
    for file in sorted(root.glob("*.proto")):
        previous = ""
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            text = line.strip()
            declares = text.endswith(("{", "{}")) or (text.endswith(";") and "=" in text and not text.startswith("syntax"))
            if declares and not text.startswith("//"):
                assert previous.startswith("//"), f"{file.name}:{number}: {text}"
            previous = text


def test_every_field_of_sampling_tells_unset_from_zero() -> None:
    for field in inference_pb2.Sampling.DESCRIPTOR.fields:
        assert field.is_repeated or field.has_presence, field.name
