"""Tokenizer, Models, Admin, health and reflection."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from serve.client import health
from serve.errors import ConfigError, RequestAborted
from serve.runtime import engine_thread, life, supervisor
from serve.runtime.commands import Abort
from serve.runtime.edition import Edition
from serve.runtime.state import State
from serve.types import RequestId
from serve.v1 import admin_pb2, models_pb2, tokenizer_pb2, types_pb2
from tests.serve.rpc.running import EOS, FakeRanks, RunningServer, request, serving, state_is, tokenizer
from tests.serve.rpc.test_validation import violations
from tests.serve.runtime.ranks import PATIENCE_SECONDS

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def test_tokenize_and_detokenize_undo_each_other() -> None:
    async with serving() as server:
        for text in ("The quick brown fox", "Größe 日本語 😀", "", "x" * 20_000):
            answer = await server.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text=text))
            assert list(answer.token_ids) == list(tokenizer().encode(text))
            assert answer.max_model_len == 256
            back = await server.tokenizer.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=answer.token_ids))
            assert back.text == text


async def test_special_tokens_are_shown_when_asked_for() -> None:
    async with serving() as server:
        shown = tokenizer_pb2.DetokenizeRequest(token_ids=[EOS], skip_special_tokens=False)
        assert (await server.tokenizer.Detokenize(shown)).text == "<|endoftext|>"
        assert (await server.tokenizer.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=[EOS]))).text == ""


async def test_render_chat_shows_the_prompt() -> None:
    async with serving() as server:
        chat = types_pb2.Chat(messages=[{"role": "user", "content": "hi"}])
        answer = await server.tokenizer.RenderChat(tokenizer_pb2.RenderChatRequest(chat=chat))
        assert answer.text == "user: hi\nassistant:"
        assert list(answer.token_ids) == list(tokenizer().encode(answer.text))


@pytest.mark.parametrize(
    ("method", "message", "field"),
    [
        ("Tokenize", tokenizer_pb2.TokenizeRequest(text="x" * 5_000_000), "text"),
        ("Tokenize", tokenizer_pb2.TokenizeRequest(special_tokens=9), "special_tokens"),  # type: ignore[arg-type]
        ("Detokenize", tokenizer_pb2.DetokenizeRequest(token_ids=[5, 2**32 - 1]), "token_ids[1]"),
        ("RenderChat", tokenizer_pb2.RenderChatRequest(), "chat.messages"),
        ("RenderChat", tokenizer_pb2.RenderChatRequest(chat={"messages": [{"role": "wizard"}]}), "chat"),
    ],
)
async def test_the_tokenizer_service_names_what_is_wrong(method: str, message: Any, field: str) -> None:
    async with serving() as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(server.tokenizer, method)(message)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in violations(caught.value)


async def test_without_a_tokenizer_its_service_is_a_failed_precondition() -> None:
    async with serving(text=None) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text="x"))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_the_model_is_described_with_its_limits() -> None:
    async with serving() as server:
        model = await server.models.GetModel(models_pb2.GetModelRequest())
        assert (model.name, model.family, model.vocab_size) == ("fake", "fake", tokenizer().vocab_size)
        assert (model.max_model_len, model.dtype, list(model.eos_ids)) == (256, "float32", [EOS])
        assert model.has_tokenizer
        assert model.has_chat_template
        assert not model.HasField("checkpoint_step")
        assert model.limits.num_sequences == 64
        assert (await server.models.ListModels(models_pb2.ListModelsRequest())).models == [model]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.models.GetModel(models_pb2.GetModelRequest(name="other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_abort_ends_a_request_as_its_own_client_could() -> None:
    async with serving() as server:
        server.ranks.last_step = 1
        call = asyncio.ensure_future(server.inference.Generate(request(tokens=250, request_id="victim")))
        await server.until_held()
        aborted = asyncio.ensure_future(server.admin.Abort(admin_pb2.AbortRequest(request_id="victim")))
        await server.until_told(1)
        server.ranks.last_step = None
        await aborted
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.admin.Abort(admin_pb2.AbortRequest(request_id="victim"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_load_tells_figures_and_limits() -> None:
    async with serving(scheduler={"max_num_seqs": 1}) as server:
        server.ranks.go.clear()
        calls = [asyncio.ensure_future(server.inference.Generate(request(tokens=3))) for _ in range(3)]
        await server.until(lambda: server.gateway.num_in_flight == 3)
        load = await server.admin.GetLoad(admin_pb2.GetLoadRequest())
        assert load.state == admin_pb2.SERVER_STATE_SERVING
        assert (load.kv_blocks_total, load.max_num_seqs, load.max_queued_requests) == (512, 1, 1024)
        server.ranks.go.set()
        await asyncio.gather(*calls)
        load = await server.admin.GetLoad(admin_pb2.GetLoadRequest())
        assert (load.num_running, load.num_waiting, load.kv_blocks_used) == (0, 0, 0)


async def test_flushing_the_prefix_cache_tells_how_many_blocks_it_held() -> None:
    async with serving() as server:
        await server.inference.Generate(request(tuple(range(1, 41)), 2))
        assert (await server.admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest())).blocks == 10
        assert (await server.admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest())).blocks == 0


async def test_drain_waits_and_then_nothing_new_is_taken() -> None:
    async with serving() as server:
        server.ranks.go.clear()
        call = asyncio.ensure_future(server.inference.Generate(request(tokens=20)))
        await server.until(lambda: server.gateway.num_in_flight == 1)
        drained = asyncio.ensure_future(server.admin.Drain(admin_pb2.DrainRequest()))
        await server.until(state_is(server, State.DRAINING))
        assert not drained.done()
        server.ranks.go.set()
        await drained
        assert len((await call).completions[0].token_ids) == 20


async def test_reload_serves_what_the_folder_holds_by_now() -> None:
    other = tokenizer(chat=False)
    lives: list[FakeRanks] = []

    def prepare(ranks: FakeRanks) -> None:
        if lives:
            ranks.loaded.clear()
        lives.append(ranks)

    async with serving(prepare=prepare, reopen=lambda edition: Edition(edition.config, other)) as server:
        assert (await server.models.GetModel(models_pb2.GetModelRequest())).has_chat_template
        reload = asyncio.ensure_future(server.admin.Reload(admin_pb2.ReloadRequest()))
        await server.until(lambda: len(lives) == 2)
        assert await check(server.channel) == NOT_SERVING
        assert not reload.done()
        lives[-1].loaded.set()
        await reload
        assert await check(server.channel) == SERVING
        assert not (await server.models.GetModel(models_pb2.GetModelRequest())).has_chat_template
        assert len((await server.inference.Generate(request())).completions[0].token_ids) == 4


async def test_a_reload_that_cannot_be_says_why_and_harms_nobody() -> None:
    def reopen(edition: Edition) -> Edition:
        raise ConfigError("model.path: tensor w is missing")

    async with serving(reopen=reopen) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.admin.Reload(admin_pb2.ReloadRequest())
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "tensor w is missing" in caught.value.details()
        assert await check(server.channel) == SERVING


async def code_of_profile(server: RunningServer, **fields: Any) -> tuple[grpc.StatusCode, str]:
    try:
        async for _ in server.admin.Profile(admin_pb2.ProfileRequest(**fields)):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def test_a_profile_says_what_it_is_asked_for_and_refuses_what_it_cannot_be() -> None:
    async with serving(model={"tensor_parallel_size": 2}) as server:
        assert await code_of_profile(server) == (grpc.StatusCode.OK, "")
        assert await code_of_profile(server, steps=100, ranks=[1], seconds=600) == (grpc.StatusCode.OK, "")
        assert server.lives[-1].recorded.begun == [((0, 1), 10, 60), ((1,), 100, 600)]
        for wrong in ({"steps": 101}, {"seconds": 601}, {"ranks": [2]}, {"ranks": [1, 1]}):
            code, details = await code_of_profile(server, **wrong)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert next(iter(wrong)) in details
        server.lives[-1].recorded.over.clear()
        first = asyncio.ensure_future(code_of_profile(server))
        await server.until(lambda: len(server.lives[-1].recorded.begun) == 3)
        assert (await code_of_profile(server))[0] is grpc.StatusCode.FAILED_PRECONDITION
        server.lives[-1].recorded.dead = True
        assert (await first)[0] is grpc.StatusCode.UNAVAILABLE


async def check(channel: Any, service: str = "") -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


async def test_health_follows_the_engine_and_watch_tells_every_change() -> None:
    async with serving(prepare=lambda ranks: ranks.loaded.clear(), wait=False) as server:
        stub: Any = health_pb2_grpc.HealthStub(server.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="serve.v1.Inference"))
        assert (await watch.read()).status == NOT_SERVING
        assert await check(server.channel) == NOT_SERVING
        await server.until(lambda: server.lives)
        server.ranks.loaded.set()
        assert (await watch.read()).status == SERVING
        assert await check(server.channel) == await check(server.channel, "serve.v1.Tokenizer") == SERVING
        server.ranks.kill()
        assert (await watch.read()).status == NOT_SERVING
        await server.until(lambda: len(server.lives) == 2)
        server.ranks.loaded.set()
        assert (await watch.read()).status == SERVING
        await server.gateway.drain()
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()


async def test_the_process_is_live_whatever_its_model_does_until_a_thread_of_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(prepare=lambda ranks: ranks.loaded.clear(), wait=False) as server:
        stub: Any = health_pb2_grpc.HealthStub(server.channel)
        await server.until(lambda: server.lives)
        assert (await check(server.channel), await check(server.channel, "liveness")) == (NOT_SERVING, SERVING)
        server.ranks.loaded.set()
        await server.gateway.until_serving()
        server.ranks.kill()
        await server.until(lambda: len(server.lives) == 2)
        assert await check(server.channel, "liveness") == SERVING
        server.ranks.loaded.set()
        await server.until(lambda: server.gateway.state is State.SERVING)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="liveness"))
        assert (await watch.read()).status == SERVING
        with hanging(server) as found:
            await server.until(found.done)
            monkeypatch.setattr(engine_thread, "STUCK_SECONDS", 0.0)
            assert (await watch.read()).status == NOT_SERVING
            assert await check(server.channel, "liveness") == NOT_SERVING
            assert await check(server.channel) == SERVING
            assert server.gateway._bridge.backlog == 0, "nothing else is asked of it"
        await server.until(lambda: server.gateway.is_live)  # a thread that rests does not hang, however long
        monkeypatch.undo()
        assert (await watch.read()).status == SERVING
        assert found.result() is False
        watch.cancel()


@contextlib.contextmanager
def hanging(server: RunningServer) -> Iterator[Future[bool]]:
    """The engine's own thread hangs within: in what it does once it has answered a command."""
    goes_on, found = threading.Event(), Future[bool]()
    found.add_done_callback(lambda _: goes_on.wait(PATIENCE_SECONDS))
    server.gateway._bridge.send(Abort(RequestId("nobody"), RequestAborted("by a test"), found))
    try:
        yield found
    finally:
        goes_on.set()


async def test_a_thread_that_outlives_its_ranks_ends_the_processes_life_when_it_never_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on = threading.Event()

    def prepare(ranks: FakeRanks) -> None:
        ranks.deaf = None if goes_on.is_set() else goes_on

    async with serving(prepare=prepare) as server:
        call = server.inference.Generate(request())
        try:
            await server.until(lambda: server.gateway._bridge.step_started_seconds is not None)
            server.ranks.kill()
            await server.until(lambda: server.gateway.state is State.DOWN)
            assert await check(server.channel, "liveness") == SERVING, "it may end yet"
            monkeypatch.setattr(life, "END_SECONDS", 0.0)
            assert await check(server.channel, "liveness") == NOT_SERVING
        finally:
            goes_on.set()
        await server.until(lambda: server.gateway.state is State.SERVING)
        assert await check(server.channel, "liveness") == SERVING
        assert len((await call).completions[0].token_ids) == 4


async def test_a_thread_that_hangs_keeps_the_server_no_longer_than_it_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "LEAVE_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "STOP_SECONDS", 0.0)
    async with serving() as server:
        with hanging(server) as found:
            await server.until(lambda: found.done())
            await server.gateway.stop()
            assert "the engine's thread hangs" in caplog.text
        thread = server.gateway._supervisor._worker
        await server.until(lambda: not thread.is_alive())


async def test_the_command_for_probes_tells_by_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(prepare=lambda ranks: ranks.loaded.clear(), wait=False) as server:
        where = ["--address", server.address, "--timeout", "60"]
        assert await asyncio.to_thread(health.main, where) == 1
        assert await asyncio.to_thread(health.main, [*where, "--live"]) == 0
        server.ranks.loaded.set()
        await server.gateway.until_serving()
        assert await asyncio.to_thread(health.main, where) == 0
    assert await asyncio.to_thread(health.main, ["--address", "127.0.0.1:1", "--timeout", "60"]) == 1
    assert health.main(["--nothing"]) == 2
    out, err = capsys.readouterr()
    assert out.split() == ["NOT_SERVING", "SERVING", "SERVING"]
    assert "127.0.0.1:1: UNAVAILABLE" in err


async def test_health_of_an_unknown_service() -> None:
    async with serving() as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(server.channel, "no.such.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        stub: Any = health_pb2_grpc.HealthStub(server.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="no.such.Service"))
        assert (await watch.read()).status == SERVICE_UNKNOWN
        listed = await stub.List(health_pb2.HealthListRequest())
        assert listed.statuses["serve.v1.Inference"].status == SERVING
        watch.cancel()


async def test_watch_streams_end_when_the_server_stops() -> None:
    async with serving() as server:
        channel = grpc.aio.insecure_channel(server.address)  # outlives the server
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(10)]
        for watch in watches:
            assert (await watch.read()).status == SERVING
        heard = asyncio.gather(*(_until_end(watch) for watch in watches))
    assert await heard == [[NOT_SERVING]] * 10
    await channel.close()


async def _until_end(watch: Any) -> list[int]:
    statuses = []
    while (answer := await watch.read()) is not grpc.aio.EOF:
        statuses.append(answer.status)
    return statuses


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_and_describes_the_services(version: str) -> None:
    async with serving() as server:
        call = server.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert names >= {"serve.v1.Inference", "serve.v1.Admin", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"}
        for name in names:
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
            assert (await call.read()).file_descriptor_response.file_descriptor_proto, name
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
