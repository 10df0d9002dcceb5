"""Both clients against a whole server on loopback."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import math
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from serve.client import (
    AsyncClient,
    Client,
    Delta,
    Finish,
    Generated,
    PromptInfo,
    Request,
    ScoreItem,
    TesseraError,
)
from serve.client.calls import Attempts, Deadline, RetryPolicy
from tests.serve.fake_executor import expected_tokens
from tests.serve.rpc.running import RunningServer, config_of, serving, tokenizer
from tests.serve.runtime.ranks import LOSING

T = TypeVar("T")


async def blocking(server: RunningServer, work: Callable[[Client], T], **options: Any) -> T:
    """Run ``work`` with a blocking client in a thread, while the server runs in this one."""

    def run() -> T:
        with Client(server.address, **options) as client:
            return work(client)

    return await asyncio.to_thread(run)


def expected(server: RunningServer, ids: tuple[int, ...], count: int, seed: int) -> tuple[int, ...]:
    return tuple(expected_tokens(ids, count, seed=seed, vocab_size=server.vocab_size))


async def test_generate_returns_everything() -> None:
    async with serving() as server:
        answer = await blocking(
            server, lambda c: c.generate([5, 6, 7], max_new_tokens=9, seed=3, ignore_eos=True, logprobs=1, request_id="mine")
        )
        assert answer.request_id == "mine"
        assert answer.token_ids == expected(server, (5, 6, 7), 9, 3)
        assert answer.text == tokenizer().decode(answer.token_ids)
        finish = answer.completions[0].finish
        assert (finish.reason, finish.matched_stop, finish.seed, finish.usage.completion_tokens) == ("length", None, 3, 9)
        assert len(answer.completions[0].logprobs) == 9
        with pytest.raises(dataclasses.FrozenInstanceError):
            answer.request_id = "other"  # type: ignore[misc]


async def test_every_kind_of_prompt_is_understood() -> None:
    async with serving() as server:

        def work(client: Client) -> list[Generated]:
            return [
                client.generate("The quick", max_new_tokens=1, echo=True),
                client.generate((5, 6), max_new_tokens=1, echo=True),
                client.generate([{"role": "user", "content": "hi"}], max_new_tokens=1, echo=True),
                client.generate([{"role": "user", "content": "hi"}], max_new_tokens=1, echo=True, add_generation_prompt=False),
            ]

        text, ids, chat, closed = await blocking(server, work)
        assert text.prompt.text == "The quick"
        assert ids.prompt.token_ids == (5, 6)
        assert (chat.prompt.text, closed.prompt.text) == ("user: hi\nassistant:", "user: hi\n")


async def test_a_stream_yields_events_and_then_ends() -> None:
    async with serving() as server:

        def work(client: Client) -> list[object]:
            with client.stream([5, 6], max_new_tokens=12, seed=1, ignore_eos=True) as events:
                return list(events)

        events = await blocking(server, work)
        assert isinstance(events[0], PromptInfo)
        assert isinstance(events[-1], Finish)
        ids = [token_id for event in events if isinstance(event, Delta) for token_id in event.token_ids]
        assert tuple(ids) == expected(server, (5, 6), 12, 1)
        text = await blocking(server, lambda c: "".join(c.stream([5, 6], max_new_tokens=12, seed=1, ignore_eos=True).text()))
        assert text == tokenizer().decode(ids)


@pytest.mark.parametrize("leave", ["close", "with", "drop"])
async def test_an_abandoned_stream_cancels_its_request(leave: str) -> None:
    async with serving() as server:
        server.ranks.last_step = 3

        def work(client: Client) -> None:
            stream = client.stream([5, 6], max_new_tokens=200, ignore_eos=True)
            next(stream)
            if leave == "close":
                stream.close()
            elif leave == "with":
                with stream:
                    pass
            else:
                del stream
                gc.collect()
            asyncio.run_coroutine_threadsafe(server.until(lambda: server.gateway.num_in_flight == 0), loop).result(60)

        loop = asyncio.get_running_loop()
        await blocking(server, work)
        server.ranks.last_step = None
        await server.until_stats(lambda stats: stats.kv_blocks_used == 0)


async def test_a_batch_comes_back_in_order_with_errors_in_their_places() -> None:
    async with serving() as server:

        def work(client: Client) -> list[Generated | TesseraError]:
            good = [Request([5, n + 1], {"max_new_tokens": 3, "seed": n, "ignore_eos": True}) for n in range(10)]
            bad = Request([5], {"temperature": math.nan})
            return client.batch([*good[:5], bad, *good[5:]])

        answers = await blocking(server, work)
        failed = answers.pop(5)
        assert isinstance(failed, TesseraError)
        assert failed.code == "INVALID_ARGUMENT"
        assert failed.violations[0].field == "sampling.temperature"
        for n, answer in enumerate(answers):
            assert isinstance(answer, Generated)
            assert answer.token_ids == expected(server, (5, n + 1), 3, n)


async def test_the_other_services_are_there() -> None:
    async with serving() as server:

        def work(client: Client) -> None:
            ids = client.tokenize("The quick brown fox")
            assert ids == tokenizer().encode("The quick brown fox")
            assert client.detokenize(ids) == "The quick brown fox"
            assert client.render_chat([{"role": "user", "content": "hi"}]).text == "user: hi\nassistant:"
            model = client.models()[0]
            assert (model.name, model.max_model_len, model.checkpoint_step) == ("fake", 256, None)
            assert model.limits.stop_strings > 0
            items = [ScoreItem([7, 8], context=[5, 6]), "The dog"]
            first, second = client.score(items, top_logprobs=1, priority=3, cache_salt="mine")
            assert [token.token_id for token in first.tokens] == [7, 8]
            assert first.sum == pytest.approx(sum(token.logprob or 0.0 for token in first.tokens))
            assert second.tokens[0].logprob is None
            load = client.load()
            assert (load.state, load.num_running, load.kv_blocks_used) == ("serving", 0, 0)
            assert load.max_queued_tokens > load.max_num_seqs > 0
            client.generate([5] * 40, max_new_tokens=1, pin_weights=True)
            assert client.flush_prefix_cache() >= 10
            assert client.flush_prefix_cache() == 0
            with pytest.raises(TesseraError) as caught:
                client.abort("nobody")
            assert caught.value.code == "NOT_FOUND"
            assert client.profile(ranks=(0,)) == {0: b"trace of 0"}
            with pytest.raises(TesseraError, match="INVALID_ARGUMENT"):
                client.profile(1000)
            client.reload()
            assert len(server.lives) == 2
            client.drain()
            assert client.load().state == "draining"

        await blocking(server, work)


async def test_errors_are_readable_and_keep_their_details() -> None:
    async with serving() as server:

        def work(client: Client) -> None:
            with pytest.raises(TesseraError, match=r"INVALID_ARGUMENT: .*sampling\.top_p: is 2") as caught:
                client.generate("x", top_p=2.0, min_p=-1.0)
            assert {violation.field for violation in caught.value.violations} == {"sampling.top_p", "sampling.min_p"}
            assert caught.value.reason == "INVALID_REQUEST"
            with pytest.raises(TypeError, match="no option 'temprature'"):
                client.generate("x", temprature=1.0)  # type: ignore[call-arg]
            with pytest.raises(TypeError, match="a prompt is"):
                client.generate(3)  # type: ignore[arg-type]

        await blocking(server, work)


UNSENDABLE = [
    (lambda client: client.generate("x", max_new_tokens=-1), "stopping.max_new_tokens"),
    (lambda client: client.generate("x", top_k=-1), "sampling.top_k"),
    (lambda client: client.generate("x", seed=2**64), "sampling.seed"),
    (lambda client: client.generate("x", logit_bias={-1: 1.0}), "sampling.logit_bias"),
    (lambda client: client.generate("x", priority=2**40), "priority"),
    (lambda client: client.generate([5, -6]), "prompt.token_ids.ids"),
    (lambda client: client.generate("half of it: \ud83d"), "prompt.text"),
    (lambda client: client.generate("x", stop_strings=["\ud83d"]), "stopping.stop_strings"),
    (lambda client: client.generate([{"role": "user", "content": "\ud83d"}]), "messages[0].content"),
    (lambda client: client.stream("x", max_new_tokens=-1), "stopping.max_new_tokens"),
    (lambda client: client.batch([Request("x", {"max_new_tokens": -1})]), "stopping.max_new_tokens"),
    (lambda client: client.score([ScoreItem([5, -1])]), "items[0].token_ids.ids"),
    (lambda client: client.score(["x"], top_logprobs=-1), "top_logprobs"),
    (lambda client: client.tokenize("\ud83d"), "text"),
    (lambda client: client.detokenize([-1]), "token_ids"),
    (lambda client: client.abort("\ud83d"), "request_id"),
]


@pytest.mark.parametrize(("ask", "field"), UNSENDABLE)
def test_what_cannot_even_be_sent_is_the_clients_own_error(ask: Callable[[Client], object], field: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(TesseraError) as caught:
        ask(client)
    assert caught.value.code == "INVALID_ARGUMENT"
    assert [violation.field for violation in caught.value.violations] == [field]
    assert field in str(caught.value)


async def test_a_timeout_ends_a_call() -> None:
    async with serving() as server:
        server.ranks.go.clear()

        def work(client: Client) -> None:
            with pytest.raises(TesseraError) as caught:
                client.generate([5], timeout=0.1)
            assert caught.value.code == "DEADLINE_EXCEEDED"

        await blocking(server, work)
        await blocking(server, work, timeout=600)


async def test_waiting_for_a_server_that_loads() -> None:
    async with serving(prepare=lambda ranks: ranks.loaded.clear(), wait=False) as server:
        await server.until(lambda: server.lives)

        def before(client: Client) -> None:
            assert not client.is_serving()
            with pytest.raises(TesseraError, match="DEADLINE_EXCEEDED"):
                client.wait_until_serving(timeout=0.15)
            with pytest.raises(TesseraError) as caught:
                client.generate([5])
            assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "LOADING")

        await blocking(server, before, retries=0)
        waiting = asyncio.ensure_future(blocking(server, lambda client: client.wait_until_serving(timeout=120)))
        server.ranks.loaded.set()
        await waiting


async def test_unavailable_is_retried_until_the_server_serves() -> None:
    async with serving(prepare=lambda ranks: ranks.loaded.clear(), wait=False) as server:
        await server.until(lambda: server.lives)
        calls = asyncio.gather(
            blocking(server, lambda c: c.generate([5], max_new_tokens=2), retries=100),
            blocking(server, lambda c: list(c.stream([5], max_new_tokens=2)), retries=100),
        )
        await server.until(lambda: server.count("Generate", "UNAVAILABLE") and server.count("GenerateStream", "UNAVAILABLE"))
        server.ranks.loaded.set()
        answer, events = await calls
        assert answer.completions
        assert isinstance(events[-1], Finish)


async def test_a_request_larger_than_what_grpc_would_send_again_is_tried_again() -> None:
    async with serving(prepare=lambda ranks: ranks.loaded.clear(), wait=False) as server:
        await server.until(lambda: server.lives)

        def work(client: Client) -> None:
            with pytest.raises(TesseraError, match="UNAVAILABLE"):
                client.generate([5000] * 200_000)

        await blocking(server, work, retries=2)
        assert server.count("Generate", "UNAVAILABLE") == 3


async def test_a_stream_that_has_begun_is_not_tried_again() -> None:
    async with serving(supervisor=LOSING) as server:
        server.ranks.last_step = 3

        def work(client: Client) -> None:
            stream = client.stream([5], max_new_tokens=200, ignore_eos=True)
            next(stream)
            server.ranks.kill()
            with pytest.raises(TesseraError) as caught:
                list(stream)
            assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "ENGINE_DOWN")

        await blocking(server, work, retries=100)
        assert server.count("GenerateStream", "UNAVAILABLE") == 1


def test_a_server_that_is_not_there_is_told_by_its_address() -> None:
    with Client("127.0.0.1:1", retries=0) as client, pytest.raises(TesseraError, match=r"no server answers at 127\.0\.0\.1:1"):
        client.generate("x")


def test_what_is_tried_again_and_when() -> None:
    full = TesseraError("RESOURCE_EXHAUSTED", "full", retry_after_seconds=1.5)
    slow = TesseraError("RESOURCE_EXHAUSTED", "slow reader")
    gone = TesseraError("UNAVAILABLE", "gone")
    policy = RetryPolicy(retries=2, when_full=True)
    assert policy.wait_seconds(full, 0) == 1.5
    assert policy.wait_seconds(full, 2) is None
    assert policy.wait_seconds(slow, 0) is None
    assert RetryPolicy(retries=2).wait_seconds(full, 0) is None
    for code in ("INVALID_ARGUMENT", "INTERNAL", "DEADLINE_EXCEEDED", "CANCELLED", "ALREADY_EXISTS"):
        assert policy.wait_seconds(TesseraError(code, ""), 0) is None
    waits = [RetryPolicy(retries=99).wait_seconds(gone, attempt) or 0.0 for attempt in range(20)]
    assert 0.05 <= waits[0] <= 0.1
    assert max(waits) <= 2.0
    drains = TesseraError("UNAVAILABLE", "draining", retry_after_seconds=1.0)
    assert 1.0 <= (policy.wait_seconds(drains, 0) or 0.0) <= 1.1, "no sooner than the server says"
    with pytest.raises(TesseraError, match="full"):  # waiting would outlast the call's own time
        Attempts(policy, Deadline(1.0)).wait_or_raise(full)


async def test_the_asyncio_client_does_the_same() -> None:
    async with serving() as server, AsyncClient(server.address) as client:
        await client.wait_until_serving(timeout=120)
        answer = await client.generate([5, 6, 7], max_new_tokens=9, seed=3, ignore_eos=True)
        assert answer.token_ids == expected(server, (5, 6, 7), 9, 3)
        async with client.stream([5, 6, 7], max_new_tokens=9, seed=3, ignore_eos=True) as stream:
            events = [event async for event in stream]
        assert isinstance(events[0], PromptInfo)
        assert isinstance(events[-1], Finish)
        pieces = client.stream([5, 6, 7], max_new_tokens=9, seed=3, ignore_eos=True).text()
        assert "".join([piece async for piece in pieces]) == answer.text
        many = await client.batch([Request([5, n], {"max_new_tokens": 2, "seed": n, "ignore_eos": True}) for n in range(5)])
        assert [a.token_ids for a in many if isinstance(a, Generated)] == [expected(server, (5, n), 2, n) for n in range(5)]
        seen = {e.request_id async for e in client.batch_stream([Request([5], {"max_new_tokens": 1, "request_id": "x"})])}
        assert seen == {"x"}
        assert client.address == server.address
        ids = await client.tokenize("The dog")
        assert await client.detokenize(ids) == "The dog"
        assert (await client.render_chat([{"role": "user", "content": "hi"}])).text == "user: hi\nassistant:"
        assert (await client.models())[0].name == "fake"
        assert len((await client.score(["The dog"]))[0].tokens) == len(ids)
        assert (await client.load()).state == "serving"
        await client.flush_prefix_cache()
        assert await client.flush_prefix_cache() == 0
        with pytest.raises(TesseraError, match="NOT_FOUND"):
            await client.abort("nobody")
        with pytest.raises(TesseraError, match="INVALID_ARGUMENT"):
            await client.generate("")
        assert await client.profile(ranks=(0,)) == {0: b"trace of 0"}
        with pytest.raises(TesseraError, match="INVALID_ARGUMENT"):
            await client.profile(1000)
        await client.reload()
        assert len(server.lives) == 2
        await client.drain()
        assert (await client.load()).state == "draining"


async def test_an_abandoned_asyncio_stream_cancels_its_request() -> None:
    async with serving() as server, AsyncClient(server.address) as client:
        server.ranks.last_step = 3
        kept = client.stream([5, 6], max_new_tokens=200, ignore_eos=True)
        await anext(kept)
        kept.close()
        await server.until(lambda: server.gateway.num_in_flight == 0)
        server.ranks.last_step += 4
        dropped = client.stream([5, 6], max_new_tokens=200, ignore_eos=True)
        await anext(dropped)
        del dropped
        await server.until(lambda: server.gateway.num_in_flight == 0)
        server.ranks.last_step = None
        await server.until_stats(lambda stats: stats.kv_blocks_used == 0)


async def test_cancelling_a_task_that_waits_cancels_the_request() -> None:
    async with serving() as server, AsyncClient(server.address) as client:
        server.ranks.go.clear()
        task = asyncio.ensure_future(client.generate([5, 6], max_new_tokens=200))
        await server.until(lambda: server.gateway.num_in_flight == 1)
        task.cancel()
        await server.until(lambda: server.gateway.num_in_flight == 0)
        server.ranks.go.set()
        assert (await asyncio.gather(task, return_exceptions=True))[0].__class__ is asyncio.CancelledError


async def test_a_full_queue_is_waited_for_when_asked() -> None:
    async with serving(scheduler={"max_num_seqs": 1}, admission={"max_queued_requests": 1}) as server:
        server.ranks.go.clear()
        async with AsyncClient(server.address, retry_when_full=True, retries=50) as client:
            calls = [asyncio.ensure_future(client.generate([5], max_new_tokens=2)) for _ in range(5)]
            await server.until(lambda: server.count("Generate", "RESOURCE_EXHAUSTED") >= 3)
            server.ranks.go.set()
            await asyncio.gather(*calls)
        assert server.count("Generate", "OK") == 5


def test_default_port_is_the_servers() -> None:
    config = dataclasses.replace(config_of().rpc, port=50051)
    with Client() as client:
        assert client.address == f"{config.host}:{config.port}"
