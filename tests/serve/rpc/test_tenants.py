"""Limits of tenants: rates, requests at once, requests that wait, priorities."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from serve.errors import InvalidRequest, TenantLimited
from serve.rpc.identity import Caller
from serve.rpc.tenants import Tenants
from serve.rpc.tokens import Limits
from tests.serve.rpc.running import request, serving
from tests.serve.rpc.test_tokens import bearer, code_of, guarded, make


def caller(**limits: int) -> Caller:
    return Caller("a", frozenset({"generate"}), Limits(**limits))


def tenants(seconds: list[float], refusals: list[tuple[str, str]]) -> Tenants:
    return Tenants(lambda: seconds[0], lambda tenant, limit: refusals.append((tenant, limit)))


async def test_requests_and_tokens_of_a_minute_refill_steadily() -> None:
    seconds, refusals = [100.0], []
    held = tenants(seconds, refusals)
    who = caller(requests_per_minute=6)
    for _ in range(6):
        await held.admit(who, prompt_tokens=1, priority=0)
    with pytest.raises(TenantLimited) as refused:
        await held.admit(who, prompt_tokens=1, priority=0)
    assert (refused.value.reason, refused.value.retry_after_seconds) == ("requests_per_minute", pytest.approx(10))
    seconds[0] += 10
    await held.admit(who, prompt_tokens=1, priority=0)
    eater = caller(tokens_per_minute=60)
    held = tenants(seconds, refusals)
    await held.admit(eater, prompt_tokens=50, priority=0)
    held.generated(eater, 40)
    with pytest.raises(TenantLimited) as refused:
        await held.admit(eater, prompt_tokens=10, priority=0)
    assert refused.value.retry_after_seconds == pytest.approx(40)
    seconds[0] += 40
    await held.admit(eater, prompt_tokens=10, priority=0)
    assert refusals == [("a", "requests_per_minute"), ("a", "tokens_per_minute")]


async def test_more_than_run_wait_in_their_order_and_more_than_wait_are_refused() -> None:
    held, who = tenants([0.0], []), caller(max_running=1, max_queued=2)
    end = await held.admit(who, prompt_tokens=1, priority=0)
    first, second = (asyncio.ensure_future(held.admit(who, prompt_tokens=1, priority=0)) for _ in range(2))
    await asyncio.sleep(0)
    with pytest.raises(TenantLimited, match="2 requests of a wait"):
        await held.admit(who, prompt_tokens=1, priority=0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    end()
    (await second)()
    (await held.admit(who, prompt_tokens=1, priority=0))()


async def test_a_priority_above_the_ceiling_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequest, match="5 is more than 1"):
        await tenants([0.0], []).admit(caller(max_priority=1), prompt_tokens=1, priority=5)


async def test_limits_hold_on_the_wire_and_places_come_back(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    token = make(file, "a", max_running=1, max_queued=0)
    async with guarded(file) as running:
        running.ranks.last_step = 2
        first = running.inference.Generate(request(tokens=6), **bearer(token))
        await running.until(lambda: running.ranks.num_steps == 2)
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
