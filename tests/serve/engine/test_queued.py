"""The queue's limits, and who gives way in a full one."""

from __future__ import annotations

import random

import pytest

from serve.engine.engine import Engine
from serve.errors import PutOut, QueueFull
from serve.types import Event, RequestFailed
from tests.serve.engine.engines import make_engine, make_request


def put_out_of(events: tuple[Event, ...]) -> list[str]:
    failed = [event for event in events if isinstance(event, RequestFailed)]
    assert all(isinstance(event.error, PutOut) and event.error.retry_after_seconds > 0 for event in failed)
    return [event.request_id for event in failed]


def filled(tenant: str, count: int, **limits: int) -> Engine:
    engine = make_engine(**limits)
    for number in range(count):
        engine.add(make_request(f"{tenant}{number}", tenant=tenant))
    return engine


def test_the_newest_of_a_flood_gives_way_until_another_tenant_has_its_half() -> None:
    engine = filled("flood", 8, max_queued_requests=8)
    with pytest.raises(QueueFull, match="8 requests are waiting"):
        engine.add(make_request("flood8", tenant="flood"))
    for number in range(4):
        engine.add(make_request(f"other{number}", tenant="other"))
        engine.check()
        assert put_out_of(engine.drain_events()) == [f"flood{7 - number}"]
    for tenant in ("other", "flood"):
        with pytest.raises(QueueFull):
            engine.add(make_request("more", tenant=tenant))
    assert engine.stats().queued_requests == 8


def test_prompt_tokens_are_shared_likewise() -> None:
    engine = make_engine(max_queued_tokens=80)
    for number in range(8):
        engine.add(make_request(f"flood{number}", (1,) * 10, tenant="flood"))
    with pytest.raises(QueueFull, match="80 prompt tokens are waiting, and 41 more") as full:
        engine.add(make_request("more than half", (1,) * 41, tenant="other"))
    assert full.value.reason == "tokens"
    engine.add(make_request("other", (1,) * 25, tenant="other"))
    assert put_out_of(engine.drain_events()) == ["flood7", "flood6", "flood5"]
    engine.check()


def test_nobody_gives_way_to_a_request_of_smaller_priority() -> None:
    engine = make_engine(max_queued_requests=2)
    engine.add(make_request("first", tenant="flood"))
    engine.add(make_request("urgent", tenant="flood", priority=1))
    engine.add(make_request("other", tenant="other"))
    assert put_out_of(engine.drain_events()) == ["first"]
    engine = make_engine(max_queued_requests=2)
    for name in ("a", "b"):
        engine.add(make_request(name, tenant="flood", priority=1))
    with pytest.raises(QueueFull):
        engine.add(make_request("other", tenant="other"))
    assert engine.stats().queued_requests == 2


def test_a_place_in_a_queue_of_one_does_not_go_to_and_fro() -> None:
    engine = filled("flood", 1, max_queued_requests=1)
    with pytest.raises(QueueFull):
        engine.add(make_request("other", tenant="other"))


def test_whoever_is_alone_may_fill_the_queue_and_limits_hold_whatever_comes() -> None:
    draw = random.Random(0)
    engine = make_engine(max_queued_requests=12, max_queued_tokens=100, max_num_seqs=2)
    for number in range(3000):
        tenant = draw.choices(("flood", "b", "c", "d"), weights=(30, 3, 2, 1))[0]
        name, prompt = f"{tenant}{number}", (1,) * draw.randint(1, 20)
        try:
            engine.add(make_request(name, prompt, tenant=tenant))
        except QueueFull:
            waiting = engine._registry.queue.ids
            own = [len(engine._registry.get(each).generation.prompt_ids) for each in waiting if each.startswith(tenant)]
            num_tenants = len({each.rstrip("0123456789") for each in waiting} | {tenant})
            has_part = len(own) + 1 > 12 // num_tenants or sum(own) + len(prompt) > 100 // num_tenants
            assert has_part, "a tenant with less than its part was refused"
        put_out_of(engine.drain_events())
        if draw.random() < 0.2:
            engine.step()
        engine.check()
        stats = engine.stats()
        assert stats.queued_requests <= 12
        assert stats.queued_tokens <= 100
    assert filled("alone", 12, max_queued_requests=12).stats().queued_requests == 12
