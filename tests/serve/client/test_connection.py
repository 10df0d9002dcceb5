"""How clients reach a server: TLS, tokens, balancing, proxies and the environment."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from serve.client import AsyncClient, Client, TesseraError, Tls
from serve.client import health as probe
from serve.client.cli import main as generate
from serve.client.connection import Connecting, Connection, Policy
from serve.rpc.tokens import add_token
from tests.serve.rpc.running import serving
from tests.serve.rpc.test_certificates import make_pair

ALONE = (("grpc.use_local_subchannel_pool", 1),)
"""Channels to one address share a connection otherwise, also across tests."""
VARIABLES = ("ADDRESS", "TOKEN", "CA", "CLIENT_CERT", "CLIENT_KEY", "SERVER_NAME")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [f"TESSERA_{it}" for it in VARIABLES] + [
        "grpc_proxy",
        "https_proxy",
        "http_proxy",
        "no_grpc_proxy",
        "no_proxy",
    ]:
        monkeypatch.delenv(name, raising=False)


def named(address: str) -> str:
    """The address by the name that the tests' certificates have."""
    return address.replace("127.0.0.1", "localhost")


def ask(address: str, **connecting: Any) -> int:
    """Tokens that a blocking client gets."""
    with Client(address, retries=0, timeout=20, options=ALONE, **connecting) as client:
        return len(client.generate([5, 6], max_new_tokens=3, ignore_eos=True).token_ids)


async def test_both_clients_speak_tls_and_show_their_own_certificate(tmp_path: Path) -> None:
    cert, key = make_pair(tmp_path, "server")
    own_cert, own_key = make_pair(tmp_path, "friend")
    async with serving(rpc={"tls_cert": str(cert), "tls_key": str(key), "tls_client_ca": str(own_cert)}) as server:
        tls = Tls(ca=cert, cert=own_cert, key=own_key)
        assert await asyncio.to_thread(ask, named(server.address), credentials=tls) == 3
        async with AsyncClient(named(server.address), credentials=tls, timeout=20, options=ALONE) as client:
            with_tokens = [event async for event in client.stream([5, 6], max_new_tokens=3, ignore_eos=True)]
            assert with_tokens
            assert await client.is_serving()
        with pytest.raises(TesseraError, match="UNAVAILABLE"):
            await asyncio.to_thread(ask, named(server.address), credentials=Tls(ca=cert))


async def test_a_server_that_cannot_prove_who_it_is_gets_no_call(tmp_path: Path) -> None:
    cert, key = make_pair(tmp_path, "server")
    stranger, _ = make_pair(tmp_path, "stranger")
    async with serving(rpc={"tls_cert": str(cert), "tls_key": str(key)}) as server:
        with pytest.raises(TesseraError, match="UNAVAILABLE"):
            await asyncio.to_thread(ask, named(server.address), credentials=Tls(ca=stranger))
        with pytest.raises(TesseraError, match="UNAVAILABLE"):  # the certificate is for localhost
            await asyncio.to_thread(ask, server.address, credentials=Tls(ca=cert))
        assert await asyncio.to_thread(ask, server.address, credentials=Tls(ca=cert, server_name="localhost")) == 3
        with pytest.raises(TesseraError, match="UNAVAILABLE"):
            await asyncio.to_thread(ask, server.address)


async def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    cert, key = make_pair(tmp_path, "old", days=-1)
    async with serving(rpc={"tls_cert": str(cert), "tls_key": str(key)}) as server:
        with pytest.raises(TesseraError, match=r"(?i)certificate"):
            await asyncio.to_thread(ask, named(server.address), credentials=Tls(ca=cert))


async def test_a_server_with_tls_and_tokens_answers_both_clients_that_have_one(tmp_path: Path) -> None:
    cert, key = make_pair(tmp_path, "server")
    file, tls = tmp_path / "tokens.json", Tls(ca=cert)
    token = add_token(file, "alice", scopes=("generate",), expires=None, given={})
    async with serving(rpc={"tls_cert": str(cert), "tls_key": str(key), "tokens": str(file)}) as server:
        address = named(server.address)
        assert await asyncio.to_thread(ask, address, credentials=tls, token=token) == 3
        async with AsyncClient(address, credentials=tls, token=token, timeout=20, options=ALONE) as client:
            assert len((await client.generate([5, 6], max_new_tokens=3, ignore_eos=True)).token_ids) == 3
        for wrong in ("", token[:-1]):
            with pytest.raises(TesseraError, match="UNAUTHENTICATED"):
                await asyncio.to_thread(ask, address, credentials=tls, token=wrong)


async def test_the_commands_speak_tls_by_option_and_by_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = make_pair(tmp_path, "server")
    async with serving(rpc={"tls_cert": str(cert), "tls_key": str(key)}) as server:
        reach = ["--address", named(server.address), "--ca", str(cert)]
        assert await asyncio.to_thread(probe.main, reach) == 0
        assert await asyncio.to_thread(generate, [*reach, "x", "--max-new-tokens", "2", "--ignore-eos"]) == 0
        monkeypatch.setenv("TESSERA_ADDRESS", server.address)
        monkeypatch.setenv("TESSERA_CA", str(cert))
        assert await asyncio.to_thread(probe.main, ["--server-name", "localhost"]) == 0
        assert await asyncio.to_thread(probe.main, ["--plain"]) == 1
    capsys.readouterr()
    assert probe.main(["--ca", str(tmp_path / "none.pem")]) == 2
    assert "none.pem cannot be read" in capsys.readouterr().err
    assert generate(["x", "--plain", "--ca", str(cert)]) == 2
    assert "exclude each other" in capsys.readouterr().err


@pytest.fixture
def recorder() -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """A server that knows no method: its address, and the metadata of each method that was called."""
    seen: dict[str, dict[str, Any]] = {}

    class Recorder(grpc.GenericRpcHandler):
        def service(self, details: Any) -> None:
            seen[details.method.rpartition("/")[2]] = dict(details.invocation_metadata)

    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=(Recorder(),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}", seen
        server.stop(0).wait()


def test_every_call_carries_the_token_and_the_metadata(recorder: tuple[str, dict[str, dict[str, Any]]]) -> None:
    address, seen = recorder

    def failing(call: Callable[[], Any]) -> None:
        with pytest.raises(TesseraError, match="UNIMPLEMENTED"):
            call()

    with Client(address, token="s3cret", metadata={"X-Team": "blue"}, options=ALONE) as client:
        for call in (
            lambda: client.generate("x"), lambda: list(client.stream("x")), lambda: list(client.batch_stream(["x"])),
            lambda: client.score(["x"]), client.models, client.load,
        ):  # fmt: skip
            failing(call)
        assert not client.is_serving()
    asyncio.run(_call_all(address))
    assert set(seen) == {"Generate", "GenerateStream", "GenerateBatch", "Score", "ListModels", "GetLoad", "Check", "Tokenize"}
    for metadata in seen.values():
        assert (metadata["authorization"], metadata["x-team"]) == ("Bearer s3cret", "blue")


async def _call_all(address: str) -> None:
    async with AsyncClient(address, token="s3cret", metadata={"x-team": "blue"}, options=ALONE) as client:
        for call in (client.generate("x"), anext(client.stream("x")), client.tokenize("x")):
            with pytest.raises(TesseraError, match="UNIMPLEMENTED"):
                await call
        assert not await client.is_serving()


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/run/a", "dns:///localhost:1", "ipv4:127.0.0.1:1,127.0.0.2:1"]
)
def test_a_token_goes_about_this_machine_without_tls(address: str) -> None:
    assert Connection.of(address, {"token": "t"}, {}).metadata == (("authorization", "Bearer t"),)


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1:1", "model.example:1", "ipv4:127.0.0.1:1,10.0.0.1:1", "dns:///model.example:1", "dns://10.0.0.1/localhost:1",
     "localhost.example:1", "127.0.0.1.example:1", "xds:///localhost"],
)  # fmt: skip
def test_a_token_does_not_leave_this_machine_without_tls(address: str) -> None:
    with pytest.raises(ValueError, match="without TLS") as refused:
        Connection.of(address, {"token": "s3cret"}, {})
    assert "s3cret" not in str(refused.value)
    with pytest.raises(ValueError, match="without TLS"):
        Connection.of(address, {"metadata": {"Authorization": "Basic abc"}}, {})
    assert Connection.of(address, {"token": "t", "plain_token": True}, {}).metadata
    assert Connection.of(address, {"token": "t", "credentials": Tls()}, {}).credentials


def test_a_token_does_not_go_through_a_proxy_in_the_open() -> None:
    with pytest.raises(ValueError, match="without TLS"):
        Connection.of("127.0.0.1:1", {"token": "t", "options": [("grpc.enable_http_proxy", 1)]}, {})


def test_what_is_given_wins_over_the_environment(tmp_path: Path) -> None:
    cert, _ = make_pair(tmp_path, "ca")
    environment = {"TESSERA_ADDRESS": "a.example:1", "TESSERA_TOKEN": "theirs", "TESSERA_CA": str(cert)}
    read = Connection.of(None, {}, environment)
    assert (read.address, read.metadata, read.credentials is None) == (
        "a.example:1",
        (("authorization", "Bearer theirs"),),
        False,
    )
    given = Connection.of("127.0.0.1:2", {"token": "mine", "credentials": "plain"}, environment)
    assert (given.address, given.metadata, given.credentials) == ("127.0.0.1:2", (("authorization", "Bearer mine"),), None)
    assert Connection.of(None, {"token": ""}, environment).metadata is None
    assert Connection.of(None, {}, {}).address == "127.0.0.1:50051"


@pytest.mark.parametrize(
    ("given", "error", "word"),
    [
        ({"token": "two words"}, ValueError, "visible ASCII"),
        ({"token": "line\n"}, ValueError, "visible ASCII"),
        ({"token": "t", "metadata": {"authorization": "Bearer u"}}, ValueError, "one of them"),
        ({"round_robin": True, "options": [("grpc.service_config", "{}")]}, ValueError, "exclude each other"),
        ({"policy": "weighted_round_robin", "options": [("grpc.service_config", "{}")]}, ValueError, "exclude each other"),
        ({"policy": "weighted_round_robin", "round_robin": True}, ValueError, "exclude each other"),
        ({"policy": "least"}, ValueError, "pick_first, round_robin, weighted_round_robin"),
        ({"credentials": "tls"}, TypeError, "grpc.ChannelCredentials"),
        ({"credentials": Tls(cert="a.pem")}, ValueError, "given together"),
        ({"credentials": Tls(ca=__file__)}, ValueError, "test_connection.py must hold certificates"),
        ({"tokens": "t"}, TypeError, "'tokens'"),
    ],
)
def test_what_is_wrong_is_told_by_its_rule(given: Connecting, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        Connection.of("127.0.0.1:1", given, {})


def test_a_certificate_for_the_client_needs_an_authority_for_the_server() -> None:
    with pytest.raises(ValueError, match="TESSERA_CA"):
        Connection.of(None, {}, {"TESSERA_CLIENT_CERT": "a.pem", "TESSERA_CLIENT_KEY": "a.key"})


def test_a_token_is_read_from_a_file(
    tmp_path: Path, recorder: tuple[str, dict[str, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    address, seen = recorder
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert probe.main(["--address", address, "--token-file", str(file)]) == 1
    assert seen["Check"]["authorization"] == "Bearer from-file"
    file.write_text("\n")
    assert generate(["x", "--address", address, "--token-file", str(file)]) == 2
    assert "is empty" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["round_robin", "weighted_round_robin"])
async def test_calls_are_spread_and_none_is_lost_when_a_server_stops(policy: Policy) -> None:
    async with serving() as one:
        counts = [0, 0]
        one.ranks.executor.on_execute = lambda plan: counts.__setitem__(0, counts[0] + len(plan.starts))
        both, go_on = threading.Event(), threading.Event()

        def work(address: str) -> list[int]:
            with Client(address, policy=policy, timeout=60, options=ALONE) as client:
                lengths = []
                while not go_on.is_set() or len(lengths) < 20:
                    lengths.append(len(client.generate([5, 6], max_new_tokens=3, ignore_eos=True).token_ids))
                    if min(counts) >= 3:
                        both.set()
                return lengths + [len(client.generate([5, 6], max_new_tokens=3, ignore_eos=True).token_ids) for _ in range(5)]

        async with serving() as other:
            other.ranks.executor.on_execute = lambda plan: counts.__setitem__(1, counts[1] + len(plan.starts))
            calls = asyncio.create_task(asyncio.to_thread(work, f"ipv4:{one.address},{other.address}"))
            assert await asyncio.to_thread(both.wait, 60)
        go_on.set()
        assert set(await calls) == {3}


def test_a_proxy_is_asked_for_other_machines_only_and_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(20)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        with Client("127.0.0.1:1", retries=0, timeout=20, options=ALONE) as client, pytest.raises(TesseraError):
            client.models()
        without = (*ALONE, ("grpc.enable_http_proxy", 0))
        with Client("ipv4:127.0.0.1:1", retries=0, timeout=20, options=without) as client, pytest.raises(TesseraError):
            client.models()
        with Client("tessera.invalid:1234", retries=0, timeout=20, options=ALONE) as client:
            asked = threading.Thread(target=client.is_serving)
            asked.start()
            with proxy.accept()[0] as connection:  # the first that came: those before went past it
                assert connection.recv(4096).startswith(b"CONNECT tessera.invalid:1234 ")
            asked.join()
