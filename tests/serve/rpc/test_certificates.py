"""TLS on the gRPC port: who gets in, and what happens when the files change."""

from __future__ import annotations

import asyncio
import datetime
import errno
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from serve.config import RpcConfig
from serve.errors import ConfigError
from serve.rpc.certificates import Certificates
from serve.rpc.server import _bind
from serve.v1 import inference_pb2_grpc, models_pb2, models_pb2_grpc
from tests.serve.fake_executor import expected_tokens
from tests.serve.rpc.running import request, serving


def make_pair(folder: Path, name: str, days: int = 2) -> tuple[Path, Path]:
    """A certificate for localhost that signed itself, with so many days to live, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    secret = ec.generate_private_key(ec.SECP256R1())
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(named)
        .issuer_name(named)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=9))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(secret, hashes.SHA256())
    )
    certificate.write_bytes(made.public_bytes(Encoding.PEM))
    key.write_bytes(secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return certificate, key


@contextmanager
def stub(port: str, roots: Path, client: tuple[Path, Path] | None = None) -> Iterator[grpc.aio.UnaryUnaryMultiCallable]:
    pair = {} if client is None else {"certificate_chain": client[0].read_bytes(), "private_key": client[1].read_bytes()}
    credentials = grpc.ssl_channel_credentials(roots.read_bytes(), **pair)
    channel = grpc.aio.secure_channel(
        port.replace("127.0.0.1", "localhost"), credentials, [("grpc.use_local_subchannel_pool", 1)]
    )
    yield channel.unary_unary("/test/Echo")


@asynccontextmanager
async def secure(address: str, roots: bytes) -> AsyncIterator[grpc.aio.Channel]:
    """A connection of its own that trusts these certificates."""
    credentials = grpc.ssl_channel_credentials(roots)
    address = address.replace("127.0.0.1", "localhost")
    async with grpc.aio.secure_channel(address, credentials, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


async def start(certificates: Certificates) -> tuple[grpc.aio.Server, str]:
    async def echo(request: bytes, context: object) -> bytes:
        return request

    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test", {"Echo": grpc.unary_unary_rpc_method_handler(echo)}),)
    )
    bound = _bind(server, "rpc.port", "127.0.0.1:0", certificates)
    await server.start()
    return server, bound


async def test_new_files_are_served_from_the_next_connection_on_and_broken_ones_are_not(tmp_path, caplog):
    certificate, key = make_pair(tmp_path, "server")
    second, second_key = make_pair(tmp_path, "second")
    old = tmp_path / "old.pem"
    old.write_bytes(certificate.read_bytes())
    server, port = await start(Certificates(RpcConfig(tls_cert=str(certificate), tls_key=str(key))))
    try:
        with stub(port, old) as first:
            assert await first(b"a", timeout=20) == b"a"
            certificate.write_bytes(second.read_bytes())  # with the key of the one before
            with caplog.at_level(logging.ERROR), stub(port, old) as one, stub(port, old) as other:
                assert await one(b"b", timeout=20) == b"b"
                assert await other(b"b", timeout=20) == b"b"
            assert sum("go on being served" in record.message for record in caplog.records) == 1
            key.write_bytes(second_key.read_bytes())
            with stub(port, second) as new:
                assert await new(b"c", timeout=20) == b"c"
            assert await first(b"d", timeout=20) == b"d"
    finally:
        await server.stop(0)


async def test_two_ports_of_one_server_both_serve_the_files_of_now(tmp_path):
    certificate, key = make_pair(tmp_path, "server")
    second, second_key = make_pair(tmp_path, "second")
    old = tmp_path / "old.pem"
    old.write_bytes(certificate.read_bytes())
    both = Certificates(RpcConfig(tls_cert=str(certificate), tls_key=str(key)))
    servers = [await start(both), await start(both)]
    try:
        for roots, pair in ((old, None), (second, (second, second_key))):
            if pair is not None:
                certificate.write_bytes(pair[0].read_bytes())
                key.write_bytes(pair[1].read_bytes())
            for _, port in servers:
                with stub(port, roots) as call:
                    assert await call(b"a", timeout=20) == b"a"
    finally:
        for server, _ in servers:
            await server.stop(0)


async def test_streams_outlive_certificates_that_are_replaced_and_new_connections_see_the_new_one(tmp_path):
    certificate, key = make_pair(tmp_path, "server")
    shown = certificate.read_bytes()
    async with serving(rpc={"tls_cert": str(certificate), "tls_key": str(key)}) as running, AsyncExitStack() as stack:

        async def meets(roots: bytes) -> bool:
            """Whether a new connection that trusts this certificate alone is answered."""
            async with secure(running.address, roots) as channel:
                models = models_pb2_grpc.ModelsStub(channel)
                return bool(await models.GetModel(models_pb2.GetModelRequest(), timeout=60))

        channels = [await stack.enter_async_context(secure(running.address, shown)) for _ in range(4)]
        ids: list[list[int]] = [[] for _ in range(32)]

        async def read(number: int) -> None:
            stub = inference_pb2_grpc.InferenceStub(channels[number % len(channels)])
            async for event in stub.GenerateStream(request((5, number), 30, sampling={"seed": number})):
                ids[number].extend(event.delta.token_ids)

        running.ranks.go.clear()
        streams = [asyncio.ensure_future(read(number)) for number in range(len(ids))]
        await running.until(lambda: running.gateway.num_in_flight == len(ids))
        running.ranks.last_step = 6  # by then each has had its first token, and none its last
        running.ranks.go.set()
        for replacement in range(20):
            await running.until(lambda replacement=replacement: min(map(len, ids)) > replacement)
            new, new_key = make_pair(tmp_path, f"new {replacement}")
            os.replace(new, certificate)
            assert await meets(shown), "the pair before, while the new certificate has no key yet"
            shown = certificate.read_bytes()
            os.replace(new_key, key)
            assert await meets(shown)
            assert not any(stream.done() for stream in streams)
            running.ranks.last_step += 1
        running.ranks.last_step = None
        await asyncio.gather(*streams)
        assert ids == [expected_tokens((5, number), 30, seed=number, vocab_size=running.vocab_size) for number in range(32)]


async def test_a_pair_that_became_whole_while_it_was_found_broken_is_served(tmp_path, monkeypatch):
    certificate, key = make_pair(tmp_path, "server")
    second, second_key = make_pair(tmp_path, "second")
    refused: list[None] = []
    files = RpcConfig(tls_cert=str(certificate), tls_key=str(key))
    certificates = Certificates(files, refused=lambda: refused.append(None))
    reads = certificates._read

    def half_then_whole() -> object:
        try:
            return reads()
        finally:
            second_key.replace(key)
            monkeypatch.undo()

    server, port = await start(certificates)
    try:
        new = second.read_bytes()
        second.replace(certificate)
        monkeypatch.setattr(certificates, "_read", half_then_whole)
        certificates._now()
        second.write_bytes(new)
        with stub(port, second) as call:
            assert await call(b"a", timeout=20) == b"a"
        assert not refused, "it was being written"
    finally:
        await server.stop(0)


def test_files_that_could_not_be_read_once_are_read_again_without_a_change(tmp_path, monkeypatch, caplog):
    certificate, key = make_pair(tmp_path, "server")
    refused: list[None] = []
    served: list[float] = []
    files = RpcConfig(tls_cert=str(certificate), tls_key=str(key))
    certificates = Certificates(files, served=served.append, refused=lambda: refused.append(None))
    for made, place in zip(make_pair(tmp_path, "second", days=5), (certificate, key), strict=True):
        made.replace(place)

    def without_descriptors() -> object:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(certificates, "_read", without_descriptors)
        for _ in range(3):
            certificates._now()
    assert len(refused) == 1
    assert caplog.text.count("Too many open files") == 1, "it is told once"
    certificates._now()
    assert len(served) == 2


async def test_without_a_certificate_of_the_client_ca_nobody_gets_in(tmp_path):
    certificate, key = make_pair(tmp_path, "server")
    friend, stranger = make_pair(tmp_path, "friend"), make_pair(tmp_path, "stranger")
    server, port = await start(
        Certificates(RpcConfig(tls_cert=str(certificate), tls_key=str(key), tls_client_ca=str(friend[0])))
    )
    try:
        with stub(port, certificate, friend) as call:
            assert await call(b"a", timeout=20) == b"a"
        for client in (None, stranger):
            with stub(port, certificate, client) as call, pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(b"a", timeout=20)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(0)


def test_a_key_of_another_certificate_is_refused_at_the_start(tmp_path):
    certificate, _ = make_pair(tmp_path, "server")
    _, key = make_pair(tmp_path, "second")
    with pytest.raises(ConfigError, match="must be a certificate and its key"):
        Certificates(RpcConfig(tls_cert=str(certificate), tls_key=str(key)))


def test_a_certificate_without_its_key_is_refused():
    with pytest.raises(ConfigError, match=r"rpc\.tls_cert"):
        RpcConfig(tls_cert="a.pem")
    with pytest.raises(ConfigError, match=r"rpc\.tls_client_ca"):
        RpcConfig(tls_client_ca="a.pem")
