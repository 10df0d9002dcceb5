"""Tokens: who gets in with which, what the file may hold, and what happens when it changes."""

from __future__ import annotations

import contextlib
import json
import logging
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from serve import cli
from serve.config import RpcConfig
from serve.errors import ConfigError
from serve.rpc import guard, orca, reflection, server
from serve.rpc.identity import Identities
from serve.rpc.tokens import add_token, digest_of, read_tokens
from serve.v1 import admin_pb2, inference_pb2, tokenizer_pb2
from tests.serve.rpc.running import RunningServer, request, serving


def bearer(token: str) -> dict[str, Any]:
    return {"metadata": (("authorization", f"Bearer {token}"),), "timeout": 20}


def make(file: Path, name: str, *scopes: str, **given: Any) -> str:
    expires = given.pop("expires", None)
    return add_token(file, name, scopes=scopes or ("generate", "score"), expires=expires, given=given)


def write(file: Path, *entries: dict[str, Any]) -> None:
    file.write_text(json.dumps({"version": 1, "tokens": entries}))


async def code_of(call: Any) -> grpc.StatusCode:
    if hasattr(call, "__aiter__"):
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
    return await call.code()


@contextlib.asynccontextmanager
async def guarded(file: Path, **rpc: Any) -> AsyncIterator[RunningServer]:
    async with serving(rpc={"tokens": str(file), **rpc}) as running:
        yield running


def test_the_table_knows_every_method_that_is_served() -> None:
    services = (server.INFERENCE, server.TOKENIZER, server.MODELS, server.ADMIN, server.HEALTH)
    served = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    served |= {f"/{name}/ServerReflectionInfo" for name in (reflection.V1, reflection.V1ALPHA)}
    served.add(f"/{orca.SERVICE}/StreamCoreMetrics")
    assert served == set(guard.SCOPES_OF)


async def test_a_token_opens_what_its_scopes_say_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    writer, scorer = make(file, "writer", "generate"), make(file, "scorer", "score")
    admin, metrics = make(file, "admin", "admin"), make(file, "prometheus", "metrics")
    score = inference_pb2.ScoreRequest(items=[{"token_ids": {"ids": [5, 6]}}])
    ok, denied = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED
    async with guarded(file) as running:
        calls = {
            "generate": lambda **with_: running.inference.Generate(request(), **with_),
            "stream": lambda **with_: running.inference.GenerateStream(request(), **with_),
            "batch": lambda **with_: running.inference.GenerateBatch(iter([request()] * 3), **with_),
            "score": lambda **with_: running.inference.Score(score, **with_),
            "tokenize": lambda **with_: running.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text="a"), **with_),
            "load": lambda **with_: running.admin.GetLoad(admin_pb2.GetLoadRequest(), **with_),
            "profile": lambda **with_: running.admin.Profile(admin_pb2.ProfileRequest(), **with_),
        }
        opens = {
            writer: {"generate", "stream", "batch", "tokenize"},
            scorer: {"score", "tokenize"},
            admin: {"load", "profile"},
            metrics: set(),
        }
        for token, opened in opens.items():
            for name, call in calls.items():
                assert await code_of(call(**bearer(token))) is (ok if name in opened else denied), name
        for name, call in calls.items():
            for given in ({}, bearer("tessera_wrong"), bearer("")):
                assert await code_of(call(**given)) is grpc.StatusCode.UNAUTHENTICATED, name
        assert running.count("Generate", "UNAUTHENTICATED") == 3
        assert running.count("Score", "PERMISSION_DENIED") == 3


async def test_health_is_open_and_what_nobody_knows_is_not(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    token = make(file, "all", "generate", "score", "admin", "metrics")
    async with guarded(file) as running:
        raw = {"request_serializer": lambda message: message, "response_deserializer": lambda data: data}
        check = running.channel.unary_unary("/grpc.health.v1.Health/Check", **raw)
        assert health_pb2.HealthCheckResponse.FromString(await check(b"", timeout=20)).status == 1
        for method in ("/serve.v1.Inference/Secret", "/no.such.Service/Method", "/grpc.channelz.v1.Channelz/GetServers"):
            unknown = running.channel.unary_unary(method, **raw)
            assert await code_of(unknown(b"", timeout=20)) is grpc.StatusCode.UNAUTHENTICATED
            assert await code_of(unknown(b"", **bearer(token))) is grpc.StatusCode.PERMISSION_DENIED
        for version in ("v1", "v1alpha"):
            method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
            described = running.channel.stream_stream(method, **raw)
            assert await code_of(described(iter([b""]), timeout=20)) is grpc.StatusCode.UNAUTHENTICATED


async def test_hostile_metadata_is_refused_and_the_next_call_answered(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    token = make(file, "a")
    right = ("authorization", f"Bearer {token}")
    hostile: list[tuple[tuple[str, Any], ...]] = [
        (("authorization-bin", b"Bearer " + token.encode()),),
        (("authorization", token),),
        (("authorization", f"Basic {token}"),),
        (("authorization", f"Bearer {token}x"),),
        (("authorization", f"Bearer {token[:-1]}"),),
        (("authorization", "Bearer " + "a" * 6000),),
        (right, ("authorization", "Bearer other")),
        (right, right),
        tuple(("authorization", f"Bearer {n}") for n in range(60)),
        (("authorization-bin", bytes(range(256)) * 8),),
    ]
    async with guarded(file) as running:
        for metadata in hostile:
            call = running.inference.Generate(request(), metadata=metadata, timeout=20)
            assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED, metadata
        large = running.inference.Generate(request(), metadata=(("authorization", "Bearer " + "a" * 40_000),), timeout=20)
        assert await code_of(large) is not grpc.StatusCode.OK
        extra = tuple((f"x-{n}-bin", b"\xff") for n in range(50))
        assert await code_of(running.inference.Generate(request(), metadata=(right, *extra), timeout=20)) is grpc.StatusCode.OK


async def test_the_file_changes_under_load_and_no_call_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    stays, goes = make(file, "stays"), make(file, "goes")
    async with guarded(file) as running:
        running.ranks.last_step = 2
        streams = [running.inference.Generate(request(tokens=6), **bearer(token)) for token in (stays, goes)]
        await running.until(lambda: running.gateway.num_in_flight == 2)
        write(file, {"name": "stays", "sha256": digest_of(stays).hex()})

        async def refused() -> bool:
            return await code_of(running.inference.Generate(request(tokens=0), **bearer(goes))) is not grpc.StatusCode.OK

        running.ranks.last_step = None
        while not await refused():
            pass
        for stream in streams:
            assert await code_of(stream) is grpc.StatusCode.OK
        assert await code_of(running.inference.Generate(request(), **bearer(stays))) is grpc.StatusCode.OK


def test_a_broken_file_leaves_the_tokens_before_it_in_force(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tokens.json"
    token = make(file, "a")
    seconds, refusals = [0.0], []
    identities = Identities(str(file), refused=lambda: refusals.append(1), clock=lambda: seconds[0])
    for broken in ("{", '{"version": 2, "tokens": []}', None):
        with caplog.at_level(logging.ERROR):
            caplog.clear()
            file.write_text(broken) if broken is not None else file.unlink()
            for _ in range(3):
                seconds[0] += 1
                assert identities.who(token) is not None
            assert len(caplog.records) == 1
    assert len(refusals) == 3
    again = make(file, "b")
    seconds[0] += 1
    assert (identities.who(token), identities.names()) == (None, {"b"})
    assert identities.who(again) is not None


def test_a_token_stops_counting_when_it_expires(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    write(file, {"name": "a", "sha256": digest_of("secret").hex(), "expires": "2030-01-01T00:00:00Z"})
    now = [1893456000.0 - 1]
    identities = Identities(str(file), now=lambda: now[0])
    assert identities.who("secret") is not None
    now[0] += 1
    assert identities.who("secret") is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "a b"}, r"tokens\[0\].name|\$\.tokens"),
        ({"sha256": "abc"}, "sha256"),
        ({"scopes": ["root"]}, "scopes"),
        ({"scopse": []}, "scopse"),
        ({"max_running": 0}, "max_running"),
        ({"max_queued": 3}, r"tokens\[0\].max_queued \(a\) needs max_running"),
        ({"expires": "2030-01-01T00:00:00"}, "expires"),
        ({"requests_per_minute": "many"}, "requests_per_minute"),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused_by_name(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    file = tmp_path / "tokens.json"
    write(file, {"name": "a", "sha256": "0" * 64, **changed})
    with pytest.raises(ConfigError, match=message) as refused:
        Identities(str(file))
    assert str(refused.value).startswith(f"rpc.tokens: {file}")


def test_entries_of_one_name_have_the_same_limits(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    one = {"name": "a", "sha256": "0" * 64}
    write(file, one, one | {"sha256": "1" * 64, "max_running": 1})
    with pytest.raises(ConfigError, match=r"tokens\[1\] \(a\) has other limits"):
        read_tokens(file)
    write(file, one, one)
    with pytest.raises(ConfigError, match=r"tokens\[1\].sha256 \(a\) is there twice"):
        read_tokens(file)


def test_the_command_shows_a_token_once_and_keeps_its_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens.json"
    made = ["token", "alice", "--file", str(file), "--scopes", "generate,admin", "--max-running", "2", "--expires-days", "9"]
    assert cli.main(made) == 0
    token = capsys.readouterr().out.strip()
    assert cli.main(["token", "alice", "--file", str(file)]) == 0, "another one, with the limits that alice has"
    capsys.readouterr()
    assert token not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    first, second = read_tokens(file)
    assert (first.max_running, second.max_running, first.scopes) == (2, 2, ("generate", "admin"))
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.json"]
    caller = Identities(str(file)).who(token)
    assert caller is not None
    assert caller.name == "alice"
    for wrong in (["--max-running", "3"], ["--scopes", "root"], ["--max-queued", "-1"]):
        before = file.read_bytes()
        assert cli.main(["token", "alice", "--file", str(file), *wrong]) == 2
        assert file.read_bytes() == before
    assert cli.main(["token", "bob", "--file", str(file), "--shared-cache"]) == 0
    assert [entry.shared_cache for entry in read_tokens(file)] == [False, False, True]
    assert cli.main(["token", "alice", "--file", str(file), "--shared-cache"]) == 2
    assert cli.main(["token", "no name", "--file", str(file)]) == 2
    assert cli.main(["token", "a", "--file", str(tmp_path / "nowhere" / "file")]) == 2


def test_tokens_that_two_processes_add_at_once_are_all_there_also_through_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "mounted" / "tokens.json", tmp_path / "config" / "tokens.json"
    for folder in (file.parent, link.parent):
        folder.mkdir()
    link.symlink_to(file)
    with contextlib.ExitStack() as stack:
        adding = [stack.enter_context(_adding(where, 40)) for where in (file, link)]
        for process in adding:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in adding:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        made = [token for process in adding for token in process.communicate(timeout=60)[0].split()]
    assert link.is_symlink()
    assert {entry.sha256 for entry in read_tokens(file)} == {digest_of(token).hex() for token in made}
    assert len(made) == 80
    assert [path.name for folder in (file.parent, link.parent) for path in folder.iterdir()] == ["tokens.json"] * 2


def _adding(file: Path, count: int) -> subprocess.Popen[str]:
    """A process that is ready, and adds tokens once it is told to."""
    program = (
        "import sys, pathlib; from serve.rpc.tokens import add_token; print('ready', flush=True); sys.stdin.readline()\n"
        "file, given = pathlib.Path(sys.argv[1]), {'scopes': ('score',), 'expires': None, 'given': {}}\n"
        f"for _ in range({count}): print(add_token(file, 'a', **given))"
    )
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program, str(file)], stdin=pipe, stdout=pipe, text=True)


def test_a_link_that_leads_to_itself_is_refused_by_name(tmp_path: Path) -> None:
    link = tmp_path / "tokens.json"
    link.symlink_to(link)
    with pytest.raises(ConfigError, match=r"tokens\.json: cannot be"):
        make(link, "a")


def test_a_public_host_needs_tls_or_the_word_for_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rpc\.host"):
        RpcConfig(host="0.0.0.0", tokens="t.json")
    assert RpcConfig(host="0.0.0.0", tls_cert="a", tls_key="b").host == "0.0.0.0"
    assert RpcConfig(host="0.0.0.0", tokens="t.json", insecure_public=True).tokens == "t.json"
