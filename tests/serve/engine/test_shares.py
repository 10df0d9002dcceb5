"""Fair turns among tenants, without a clock."""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from serve.engine import shares as shares_module
from serve.engine.shares import Shares
from serve.types import Generation, RequestId, SamplingParams, StoppingParams


def asked(tenant: str, tokens: int = 10, priority: int = 0) -> Generation:
    return Generation(
        request_id=RequestId("r"), prompt_ids=(1,) * tokens, sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=0), tenant=tenant, priority=priority,
    )  # fmt: skip


def test_a_flood_of_one_tenant_delays_another_by_one_request() -> None:
    shares = Shares()
    waiting = [(shares.enter(asked("flood")), place, "flood") for place in range(1000)]
    for place in range(200):
        turn, _, _ = heapq.heappop(waiting)
        shares.began(0, turn)
        if place % 50 == 7:
            heapq.heappush(waiting, (shares.enter(asked("other")), 1000 + place, "other"))
            assert "other" in [tenant for _, _, tenant in heapq.nsmallest(2, waiting)]


def test_one_tenants_turns_are_in_order_of_arrival_and_two_share_by_tokens() -> None:
    rng, shares = random.Random(0), Shares()
    turns = [shares.enter(asked("a", rng.randint(1, 50))) for _ in range(200)]
    assert turns == sorted(set(turns))
    shares = Shares()
    waiting = [(shares.enter(asked("large", 40)), "large") for _ in range(100)]
    waiting += [(shares.enter(asked("small", 10)), "small") for _ in range(400)]
    first = [tenant for _, tenant in sorted(waiting)[:100]]
    assert abs(first.count("small") - 80) <= 2


class Unpruned:
    """The rule alone: forgets nothing."""

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        self.next: dict[tuple[int, str], int] = {}

    def enter(self, generation: Generation) -> int:
        key = generation.priority, generation.tenant
        turn = max(self.now.get(generation.priority, 0), self.next.get(key, 0))
        self.next[key] = turn + len(generation.prompt_ids)
        return turn

    def began(self, priority: int, turn: int) -> None:
        self.now[priority] = max(self.now.get(priority, 0), turn)


def test_what_is_forgotten_changes_no_turn() -> None:
    for seed in range(20):
        rng, shares, unpruned = random.Random(seed), Shares(), Unpruned()
        waiting: list[tuple[int, int]] = []
        running: list[int] = []
        for _ in range(1500):
            match rng.choices(("comes", "begins", "leaves", "gives up"), (4, 3, 3, 1))[0]:
                case "comes":
                    generation = asked(f"t{rng.randrange(100)}", rng.randint(1, 30), rng.randrange(8))
                    turn = shares.enter(generation)
                    assert turn == unpruned.enter(generation)
                    waiting.append((generation.priority, turn))
                case "begins" if waiting:
                    priority, turn = waiting.pop(rng.randrange(len(waiting)))
                    shares.began(priority, turn)
                    unpruned.began(priority, turn)
                    running.append(priority)
                case "leaves" if running:
                    shares.leave(running.pop(rng.randrange(len(running))))
                case "gives up" if waiting:
                    shares.leave(waiting.pop(rng.randrange(len(waiting)))[0])
            shares.check(len(waiting) + len(running))


def test_what_lives_keeps_its_turns_however_many_priorities_come_and_go() -> None:
    shares = Shares()
    before = [shares.enter(asked("a", priority=-1)) for _ in range(3)]
    visit(shares, range(10_000))
    assert shares.enter(asked("a", priority=-1)) == before[-1] + 10
    assert shares.enter(asked("b", priority=-1)) == 0


def test_ever_other_priorities_cost_bounded_memory_and_the_same_work_each() -> None:
    shares = Shares()
    visit(shares, range(20_000))
    assert sum(len(line.next) for line in shares._lines.values()) <= shares_module._MOST_IDLE
    few, many = (instructions(lambda count=count: visit(Shares(), range(count))) for count in (5_000, 10_000))
    assert many < 2.5 * few


def test_tenants_that_the_clock_has_passed_are_forgotten_at_bounded_work() -> None:
    def flood(count: int) -> Shares:
        shares = Shares()
        for place in range(count):
            turn = shares.enter(asked(f"t{place}"))
            shares.began(0, turn + 10)
        return shares

    assert len(flood(5_000)._lines[0].next) <= 2 * shares_module._FEW
    few, many = (instructions(lambda count=count: flood(count)) for count in (2_000, 4_000))
    assert many < 2.5 * few


def visit(shares: Shares, priorities: range) -> None:
    """A request of each priority comes, begins and ends."""
    for priority in priorities:
        shares.began(priority, shares.enter(asked("a", priority=priority)))
        shares.leave(priority)


def instructions(work: Callable[[], Any]) -> int:
    """How many instructions of the interpreter the shares take for a piece of work."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != shares_module.__file__:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
