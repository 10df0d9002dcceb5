"""Steps that leave rows out, so that another tenant's first token comes sooner."""

from __future__ import annotations

import dataclasses

import pytest

from serve.engine.engine import Engine
from serve.engine.first_tokens import ONE_STEP_IN
from serve.types import TokensOut
from tests.serve.engine.engines import ids_of, make_engine, make_request, run
from tests.serve.fake_executor import FakeExecutor, expected_tokens, fake_facts

ON_CPU = fake_facts(num_blocks=256)


def flooded(count: int = 4, **limits: int) -> tuple[Engine, FakeExecutor]:
    """An engine of eight places, half of which one tenant has taken."""
    executor = FakeExecutor(ON_CPU)
    engine = make_engine(ON_CPU, executor=executor, **limits)
    for number in range(count):
        engine.add(make_request(f"flood{number}", (number + 1,) * 3, max_new=30, tenant="flood"))
    for _ in range(3):
        engine.step()
    return engine, executor


def rows_of(executor: FakeExecutor, first: int) -> list[list[int]]:
    """The sequences of each step from ``first`` on."""
    return [[span.sequence for span in plan.spans] for plan in executor.given[first:]]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_step_in_which_another_tenant_begins_is_its_own(*, runs_ahead: bool) -> None:
    engine, executor = flooded(async_scheduling=runs_ahead)
    first = len(executor.given)
    engine.add(make_request("other", (7, 8, 9), max_new=5, tenant="other"))
    events = list(engine.step())
    if runs_ahead:
        assert not any(isinstance(event, TokensOut) and event.request_id == "other" for event in events)
        events += engine.step()
    events += run(engine)
    alone = next(rows for rows in rows_of(executor, first) if len(rows) == 1)
    begins = rows_of(executor, first).index(alone)
    assert begins <= int(runs_ahead)
    assert rows_of(executor, first)[begins + 1] == [0, 1, 2, 3, *alone], "they are back in the next step"
    assert ids_of(events, "other") == expected_tokens((7, 8, 9), 5)
    for number in range(4):
        assert ids_of(events, f"flood{number}")[-20:] == expected_tokens((number + 1,) * 3, 30)[-20:]


def test_one_step_in_four_leaves_rows_out_however_often_others_come() -> None:
    engine, executor = flooded(max_num_seqs=64, count=32)
    first = len(executor.given)
    for number in range(10):
        engine.add(make_request(f"other{number}", (7, number), max_new=20, tenant="other"))
        engine.step()
        engine.check()
    short = [index for index, rows in enumerate(rows_of(executor, first)) if 0 not in rows]
    assert short == list(range(0, 10, ONE_STEP_IN))


@pytest.mark.parametrize(
    "why",
    ["the tenant has less than its share", "priority", "the prompt is too long", "a GPU", "guesses", "its own"],
)
def test_all_rows_are_computed_where(why: str) -> None:
    facts = dataclasses.replace(ON_CPU, device="cuda:0") if why == "a GPU" else ON_CPU
    executor = FakeExecutor(facts)
    engine = make_engine(facts, executor=executor, speculative_tokens=8 if why == "guesses" else 0)
    count = 3 if why == "the tenant has less than its share" else 4
    priority = 1 if why == "priority" else 0
    for number in range(count):
        engine.add(make_request(f"flood{number}", (number + 1,) * 3, max_new=8, tenant="flood", priority=priority))
    engine.step()
    first = len(executor.given)
    prompt = (7,) * (62 if why == "the prompt is too long" else 2)
    engine.add(make_request("other", prompt, max_new=2, tenant="flood" if why == "its own" else "other"))
    engine.step()
    assert len(rows_of(executor, first)[0]) == count + 1
    run(engine)


@pytest.mark.parametrize(("prompt", "rows"), [((7, 8), [4]), ((7,) * 6, [0, 1, 2, 3])])
def test_what_is_left_out_finds_the_blocks_that_it_wants(prompt: tuple[int, ...], rows: list[int]) -> None:
    facts = fake_facts(num_blocks=9)  # of 4 positions each
    executor = FakeExecutor(facts)
    engine = make_engine(facts, executor=executor)
    for number in range(4):
        engine.add(make_request(f"flood{number}", (number + 1,) * 3, max_new=3, tenant="flood"))
    engine.step()
    engine.step()
    engine.add(make_request("other", prompt, max_new=1, tenant="other"))
    run(engine)
    assert rows_of(executor, 2)[0] == rows, "each of the four wants a block, of five"
    assert engine.stats().preemptions == 0


def test_nothing_is_left_out_beside_a_prompt_that_is_being_computed() -> None:
    engine, executor = flooded()
    engine.add(make_request("long", (5,) * 90, max_new=2, tenant="flood"))
    engine.step()
    first = len(executor.given)
    engine.add(make_request("other", (7, 8), max_new=2, tenant="other"))
    events = run(engine)
    assert rows_of(executor, first)[0] == [0, 1, 2, 3, 4, 5], "the rest of the long one takes longer than all others"
    assert ids_of(events, "long") == expected_tokens((5,) * 90, 2)


def test_two_tenants_for_whom_others_give_way_begin_at_once() -> None:
    engine, executor = flooded(count=8)
    engine.add(make_request("one", (7, 8), max_new=30, tenant="one"))
    for _ in range(ONE_STEP_IN):
        engine.step()
    first = len(executor.given)
    for name in ("two", "three"):  # what gave way for the one waits before them
        engine.add(make_request(name, (7, 8), max_new=2, tenant=name))
    run(engine)
    rows = rows_of(executor, first)[0]
    assert {9, 10} <= set(rows), "places were made for both"
    assert len(rows) == 8
