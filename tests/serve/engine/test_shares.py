"""Fair turns among tenants, without a clock."""

from __future__ import annotations

import heapq
import random

from serve.engine.shares import Shares
from serve.types import Generation, RequestId, SamplingParams, StoppingParams


def asked(tenant: str, tokens: int = 10, priority: int = 0) -> Generation:
    return Generation(
        request_id=RequestId("r"), prompt_ids=(1,) * tokens, sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=0), tenant=tenant, priority=priority,
    )  # fmt: skip


def test_a_flood_of_one_tenant_delays_another_by_one_request() -> None:
    shares = Shares()
    waiting = [(shares.turn(asked("flood")), place, "flood") for place in range(1000)]
    for place in range(200):
        turn, _, _ = heapq.heappop(waiting)
        shares.began(0, turn)
        if place % 50 == 7:
            heapq.heappush(waiting, (shares.turn(asked("other")), 1000 + place, "other"))
            assert "other" in [tenant for _, _, tenant in heapq.nsmallest(2, waiting)]


def test_one_tenants_turns_are_in_order_of_arrival_and_two_share_by_tokens() -> None:
    rng, shares = random.Random(0), Shares()
    turns = [shares.turn(asked("a", rng.randint(1, 50))) for _ in range(200)]
    assert turns == sorted(set(turns))
    shares = Shares()
    waiting = [(shares.turn(asked("large", 40)), "large") for _ in range(100)]
    waiting += [(shares.turn(asked("small", 10)), "small") for _ in range(400)]
    first = [tenant for _, tenant in sorted(waiting)[:100]]
    assert abs(first.count("small") - 80) <= 2
