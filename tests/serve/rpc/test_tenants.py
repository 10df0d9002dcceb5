"""Limits of tenants: rates, requests at once, requests that wait, priorities."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from serve.errors import InvalidRequest, TenantLimited
from serve.rpc.checks import MAX_PRIORITY
from serve.rpc.identity import ANYONE, Caller
from serve.rpc.tenants import REFUSALS, Tenants, Ticket
from serve.rpc.tokens import Limits
from serve.v1 import admin_pb2, inference_pb2
from tests.serve.rpc.running import RunningServer, request, serving
from tests.serve.rpc.test_tokens import bearer, code_of, guarded, make


def scored(**fields: Any) -> inference_pb2.ScoreRequest:
    return inference_pb2.ScoreRequest(items=[{"token_ids": {"ids": [5, 6]}}] * 2, **fields)


def caller(**limits: int) -> Caller:
    return Caller("a", frozenset({"generate"}), Limits(**limits))


class Heard:
    """Keeps what it is told."""

    def __init__(self, refusals: list[tuple[str, str]]) -> None:
        self.refusals = refusals
        self.num_held: dict[str, int] = {}

    def refused(self, tenant: str, limit: str) -> None:
        self.refusals.append((tenant, limit))

    def held(self, tenant: str, requests: int) -> None:
        self.num_held[tenant] = requests


def tenants(seconds: list[float], refusals: list[tuple[str, str]], most_queued: int = 4) -> Tenants:
    return Tenants(lambda: seconds[0], Heard(refusals), most_queued=most_queued)


async def admit(held: Tenants, who: Caller, prompt_tokens: int = 1, priority: int = 0) -> Ticket:
    """What the service does: in, the prompt is tokenised meanwhile, and on to the engine."""
    ticket = held.enter(who, priority)
    try:
        await ticket.begin(prompt_tokens)
    except BaseException as error:
        ticket.end(refused=isinstance(error, REFUSALS))
        raise
    return ticket


async def test_requests_and_tokens_of_a_minute_refill_steadily() -> None:
    seconds, refusals = [100.0], []
    held = tenants(seconds, refusals)
    who = caller(requests_per_minute=6)
    for _ in range(6):
        await admit(held, who, 1)
    with pytest.raises(TenantLimited) as refused:
        await admit(held, who, 1)
    assert (refused.value.reason, refused.value.retry_after_seconds) == ("requests_per_minute", pytest.approx(10))
    seconds[0] += 10
    await admit(held, who, 1)
    eater = caller(tokens_per_minute=60)
    held = tenants(seconds, refusals)
    await admit(held, eater, 50)
    held.generated(eater, 40)
    with pytest.raises(TenantLimited) as refused:
        await admit(held, eater, 10)
    assert refused.value.retry_after_seconds == pytest.approx(31), "the length of the prompt is not known yet"
    seconds[0] += 31
    with pytest.raises(TenantLimited) as refused:
        await admit(held, eater, 10)
    assert refused.value.retry_after_seconds == pytest.approx(9)
    seconds[0] += 9
    await admit(held, eater, 10)
    assert refusals == [("a", "requests_per_minute"), ("a", "tokens_per_minute"), ("a", "tokens_per_minute")]


async def test_more_than_run_wait_in_their_order_and_more_than_wait_are_refused() -> None:
    held, who = tenants([0.0], []), caller(max_running=1, max_queued=2)
    ticket = await admit(held, who, 1)
    first, second = (asyncio.ensure_future(admit(held, who, 1)) for _ in range(2))
    await asyncio.sleep(0)
    with pytest.raises(TenantLimited, match="2 requests of a wait"):
        await admit(held, who, 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    ticket.end()
    (await second).end()
    (await admit(held, who, 1)).end()


async def test_what_is_refused_costs_nothing_of_a_minute() -> None:
    seconds = [0.0]
    held, who = tenants(seconds, []), caller(requests_per_minute=3, tokens_per_minute=100, max_running=1, max_queued=0)
    ticket = await admit(held, who, 10)
    for _ in range(5):
        with pytest.raises(TenantLimited, match="0 requests of a wait"):
            held.enter(who, 0)
    ticket.end()
    with pytest.raises(TenantLimited, match="100 tokens per minute"):
        await admit(held, who, 95)
    held.enter(who, 0).end(refused=True)
    ticket = await admit(held, who, 90)
    ticket.end(refused=True)
    ticket = await admit(held, who, 90)
    ticket.end()
    with pytest.raises(TenantLimited) as refused:
        held.enter(who, 0)
    assert refused.value.reason == "tokens_per_minute"
    seconds[0] += 30
    (await admit(held, who, 40)).end()
    assert held._tenants["a"].requests._used == pytest.approx(2 - 1.5 + 1)


async def test_what_is_let_in_and_not_tokenised_yet_has_a_place_in_the_tenants_queue() -> None:
    held, who = tenants([0.0], []), caller(max_running=1, max_queued=1)
    first, second = held.enter(who, 0), held.enter(who, 0)
    with pytest.raises(TenantLimited, match="1 requests of a wait"):
        held.enter(who, 0)
    await first.begin(1)
    waiting = asyncio.ensure_future(second.begin(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    first.end()
    await waiting
    second.end()
    assert (held._tenants["a"].num_inside, held._tenants["a"].num_running) == (0, 0)


async def test_as_many_of_a_tenant_wait_as_the_server_says_where_its_tokens_do_not() -> None:
    held, who = tenants([0.0], [], most_queued=2), caller(max_running=1)
    tickets = [held.enter(who, 0) for _ in range(3)]
    with pytest.raises(TenantLimited) as refused:
        held.enter(who, 0)
    assert refused.value.reason == "queued"
    tickets[0].end()
    held.enter(who, 0)


async def test_a_call_that_ends_at_the_moment_of_its_turn_passes_it_on() -> None:
    held, who = tenants([0.0], []), caller(max_running=1)
    ticket = await admit(held, who)
    first, second = (asyncio.ensure_future(admit(held, who)) for _ in range(2))
    await asyncio.sleep(0)
    ticket.end()
    first.cancel()
    (await second).end()
    assert held._tenants["a"].num_inside == 0


def of_tenants(running: RunningServer, name: str, tenant: str) -> float | None:
    return running.metrics.registry.get_sample_value(f"tessera_tenant_{name}", {"tenant": tenant})


async def test_an_administrator_ends_what_waits_for_its_tenants_turn(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    token, admin = make(file, "a", max_running=1), make(file, "root", "admin")
    async with guarded(file) as running:
        running.ranks.last_step = 1
        first = running.inference.Generate(request(tokens=6), **bearer(token))
        await running.until_held()
        waiting = [
            running.inference.Generate(request(request_id="mine"), **bearer(token)),
            running.inference.Score(scored(request_id="scored"), **bearer(token)),
        ]
        await running.until(lambda: of_tenants(running, "requests_held", "a") == 2)
        for name, call in zip(("mine", "scored"), waiting, strict=True):
            await running.admin.Abort(admin_pb2.AbortRequest(request_id=name), **bearer(admin))
            assert await code_of(call) is grpc.StatusCode.CANCELLED
        assert of_tenants(running, "requests_held", "a") == 0
        running.ranks.last_step = None
        assert await code_of(first) is grpc.StatusCode.OK


async def test_the_metrics_tell_what_each_tenant_asks_for_and_has(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    one, other = make(file, "one"), make(file, "other")
    async with serving(rpc={"tokens": str(file)}, scheduler={"max_num_seqs": 2}) as running:
        assert of_tenants(running, "requests_total", "one") is None, "a tenant appears with its first request"
        await running.inference.Generate(request(tokens=4), **bearer(one))
        running.ranks.last_step = running.ranks.num_steps
        calls = [running.inference.Generate(request(tokens=40), **bearer(one)) for _ in range(3)]
        await running.until(lambda: running.gateway.num_in_flight == 3)

        def two_run_and_one_waits() -> bool:
            """Step by step: the engine hears of the three between two of them."""
            if running.ranks.num_steps == running.ranks.last_step:
                running.ranks.last_step += 1
            return [of_tenants(running, name, "one") for name in ("sequences_running", "requests_queued")] == [2, 1]

        await running.until(two_run_and_one_waits)
        running.ranks.last_step = None
        await asyncio.gather(*calls)
        await running.inference.Generate(request((5, 6), tokens=2), **bearer(other))
        names = ("requests_total", "prompt_tokens_total", "generation_tokens_total", "sequences_running", "requests_queued")
        for tenant, figures in (("one", (4, 12, 124, 0, 0)), ("other", (1, 2, 2, 0, 0))):
            wanted = dict(zip(names, figures, strict=True))
            await running.until(lambda t=tenant, w=wanted: {name: of_tenants(running, name, t) for name in names} == w)
        assert of_tenants(running, "requests_total", "") is None


async def test_a_priority_above_the_ceiling_is_the_callers_mistake() -> None:
    held = tenants([0.0], [])
    with pytest.raises(InvalidRequest, match=r"5 is more than 1.*max_priority in the file of tokens"):
        held.enter(caller(max_priority=1), 5)
    with pytest.raises(InvalidRequest, match="1 is more than 0"):
        held.enter(caller(), 1)
    for who, priority in ((caller(max_priority=1), 1), (caller(), -3), (ANYONE, MAX_PRIORITY)):
        held.enter(who, priority).end()


async def test_nobody_outranks_others_whose_tokens_do_not_say_so(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    plain, first = make(file, "plain"), make(file, "first", max_priority=7)
    async with guarded(file) as running:
        for token, priority, code in (
            (plain, 1, grpc.StatusCode.INVALID_ARGUMENT),
            (plain, 0, grpc.StatusCode.OK),
            (first, 7, grpc.StatusCode.OK),
        ):
            assert await code_of(running.inference.Generate(request(priority=priority), **bearer(token))) is code
            assert await code_of(running.inference.Score(scored(priority=priority), **bearer(token))) is code


async def test_limits_hold_on_the_wire_and_places_come_back(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    token = make(file, "a", max_running=1, max_queued=0)
    async with guarded(file) as running:
        running.ranks.last_step = 2
        first = running.inference.Generate(request(tokens=6), **bearer(token))
        await running.until_held()
        refused = running.inference.Generate(request(), **bearer(token))
        assert await code_of(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "grpc-retry-pushback-ms" in dict(await refused.trailing_metadata())
        first.cancel()
        running.ranks.last_step = None
        labels = {"tenant": "a", "limit": "queued"}
        assert running.metrics.registry.get_sample_value("tessera_tenant_refusals_total", labels) == 1
        while await code_of(running.inference.GenerateStream(request(), **bearer(token))) is not grpc.StatusCode.OK:
            pass
        batch = running.inference.GenerateBatch(iter([request()]), **bearer(token))
        assert await code_of(batch) is grpc.StatusCode.OK


async def test_the_rates_are_asked_before_a_text_is_tokenised_and_a_full_queue_costs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    token, other = make(file, "a", requests_per_minute=2), make(file, "other")
    scheduler, admission = {"max_num_seqs": 1}, {"max_queued_requests": 1}
    async with serving(rpc={"tokens": str(file)}, scheduler=scheduler, admission=admission) as running:
        running.ranks.last_step = 1
        calls = [running.inference.Generate(request(tokens=6), **bearer(other))]
        await running.until_held()
        calls.append(running.inference.Generate(request(tokens=6, priority=0), **bearer(token)))
        await running.until_told(1)
        for method, message in (
            ("Generate", request()), ("GenerateStream", request()),
            ("Score", scored()),
        ):  # fmt: skip
            refused = getattr(running.inference, method)(message, **bearer(token))
            assert await code_of(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "requests are waiting" in await refused.details()
        running.ranks.last_step = None
        assert [await code_of(call) for call in calls] == [grpc.StatusCode.OK] * 2
        assert await code_of(running.inference.Generate(request(), **bearer(token))) is grpc.StatusCode.OK
        late = running.inference.Generate(request(chat={"messages": [{"role": "wizard", "content": "x"}]}), **bearer(token))
        assert await code_of(late) is grpc.StatusCode.RESOURCE_EXHAUSTED, "the template, which refuses it, was not asked"
        wrong = running.inference.Generate(request(sampling={"top_p": 7.0}), **bearer(token))
        assert await code_of(wrong) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_tenant_shares_cached_prefixes_with_itself_alone(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    one, other = make(file, "one"), make(file, "other")
    ids = tuple(range(5, 45))

    async with guarded(file) as running:

        async def cached(token: str, salt: str) -> int:
            answer = await running.inference.Generate(request(ids, cache_salt=salt), **bearer(token))
            return int(answer.completions[0].finish.usage.cached_tokens)

        assert [await cached(one, "s"), await cached(other, "s"), await cached(one, "t")] == [0, 0, 0]
        assert await cached(one, "s") > 0
        assert await cached(other, "s") > 0


async def test_tenants_whose_tokens_say_so_share_cached_prefixes_with_each_other_alone(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    one, other = (make(file, name, shared_cache=True) for name in ("one", "other"))
    alone = make(file, "alone")
    ids = tuple(range(5, 45))

    async with guarded(file) as running:

        async def cached(token: str, ids: tuple[int, ...] = ids, salt: str = "") -> int:
            answer = await running.inference.Generate(request(ids, cache_salt=salt), **bearer(token))
            return int(answer.completions[0].finish.usage.cached_tokens)

        assert [await cached(alone), await cached(one), await cached(other, salt="other's")] == [0, 0, 0]
        assert await cached(other) > 0
        message = inference_pb2.ScoreRequest(items=[{"token_ids": {"ids": [7, *ids]}}])
        await running.inference.Score(message, **bearer(one))
        assert await cached(alone, (7, *ids)) == 0
        assert await cached(other, (7, *ids)) > 0


async def test_another_tenants_request_passes_those_of_a_flood(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    flood, other = make(file, "flood"), make(file, "other")
    async with serving(rpc={"tokens": str(file)}, scheduler={"max_num_seqs": 1}) as running:
        running.ranks.last_step = 1
        ended: list[str] = []

        async def generate(name: str, token: str) -> None:
            await running.inference.Generate(request(tokens=2), **bearer(token))
            ended.append(name)

        calls = [asyncio.ensure_future(generate("flood", flood)) for _ in range(6)]
        await running.until(lambda: running.gateway.num_in_flight == 6)
        calls.append(asyncio.ensure_future(generate("other", other)))
        await running.until(lambda: running.gateway.num_in_flight == 7)
        running.ranks.last_step = None
        await asyncio.gather(*calls)
        assert ended.index("other") <= 2
