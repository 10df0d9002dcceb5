"""Steps that leave rows out, so that another tenant's first token comes sooner."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from serve.engine.engine import Engine
from serve.engine.first_tokens import MOST_AT_ONCE, ONE_STEP_IN
from serve.errors import RequestAborted
from serve.types import Event, RequestId, TokensOut
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


def test_one_step_in_four_leaves_rows_out_in_the_mean_however_often_others_come() -> None:
    engine, executor = flooded(max_num_seqs=64, count=32)
    first = len(executor.given)
    for number in range(18):
        engine.add(make_request(f"other{number}", (7, number), max_new=20, tenant="other"))
        engine.step()
        engine.check()
    short = [index for index, rows in enumerate(rows_of(executor, first)) if 0 not in rows]
    assert short == [*range(MOST_AT_ONCE), *range(MOST_AT_ONCE + 1, 18, ONE_STEP_IN)]


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


def begin_in_the_middle(engine: Engine, executor: FakeExecutor, *, lets_pass: bool = True) -> tuple[Event, ...]:
    """A step is under way, another tenant's request comes and may overtake it; the events until that has ended."""
    assert len(engine._under_way) == 1
    executor.lets_pass = lets_pass
    engine.add(make_request("other", (7, 8, 9), max_new=5, tenant="other"))
    engine.overtake()
    return engine.step()


@pytest.mark.parametrize("lets_pass", [True, False])
def test_a_prompt_overtakes_the_step_under_way_of_a_tenant_with_more(*, lets_pass: bool) -> None:
    engine, executor = flooded(async_scheduling=True)
    events = [*begin_in_the_middle(engine, executor, lets_pass=lets_pass)]
    assert executor.num_overtaking == 1
    first = next(event for event in events if isinstance(event, TokensOut))
    assert (first.request_id == "other") == lets_pass
    engine.check()
    events += run(engine)
    assert engine.stats().steps_overtaken == int(lets_pass)
    assert ids_of(events, "other") == expected_tokens((7, 8, 9), 5)
    for number in range(4):
        assert ids_of(events, f"flood{number}")[-20:] == expected_tokens((number + 1,) * 3, 30)[-20:]


def test_where_all_places_are_taken_somebody_gives_way_once_the_step_has_ended() -> None:
    engine, executor = flooded(count=8, async_scheduling=True)
    events = [*begin_in_the_middle(engine, executor)]
    assert executor.num_overtaking == 1
    assert engine.stats().preemptions == 0
    engine.check()
    while not engine.stats().preemptions:
        events += engine.step()
        engine.check()
    assert max(len(rows) for rows in rows_of(executor, 0)) == 8, "a step had more rows than there are places"
    events += run(engine)
    assert ids_of(events, "other") == expected_tokens((7, 8, 9), 5)
    for number in range(8):
        assert ids_of(events, f"flood{number}")[-20:] == expected_tokens((number + 1,) * 3, 30)[-20:]


@pytest.mark.parametrize("why", ["its own", "fewer", "a sequence ended", "a GPU", "nothing is under way", "priority"])
def test_no_step_is_overtaken_where(why: str) -> None:
    facts = dataclasses.replace(ON_CPU, device="cuda:0") if why == "a GPU" else ON_CPU
    executor = FakeExecutor(facts)
    engine = make_engine(facts, executor=executor, async_scheduling=why != "nothing is under way")
    for number in range(1 if why == "fewer" else 4):
        priority = int(why == "priority")
        engine.add(make_request(f"flood{number}", (number + 1,) * 3, max_new=30, tenant="flood", priority=priority))
    for _ in range(3):
        engine.step()
    if why == "a sequence ended":
        assert engine.abort(RequestId("flood1"), RequestAborted("aborted"))
    engine.add(make_request("other", (7, 8, 9), max_new=5, tenant="flood" if why == "its own" else "other"))
    engine.overtake()
    assert executor.num_overtaking == 0
    assert ids_of(run(engine), "other") == expected_tokens((7, 8, 9), 5)


def test_one_step_in_four_is_overtaken_in_the_mean_however_often_others_come() -> None:
    engine, executor = flooded(max_num_seqs=64, count=32, async_scheduling=True)
    for number in range(24):
        engine.add(make_request(f"other{number}", (7, number), max_new=20, tenant="other"))
        engine.overtake()
        engine.step()
        engine.check()
    alone = [index for index, rows in enumerate(rows_of(executor, 0)) if len(rows) == 1 and rows != [0]]
    assert executor.num_overtaking > MOST_AT_ONCE
    for begin, end in itertools.combinations(range(len(alone)), 2):
        assert end - begin + 1 <= MOST_AT_ONCE + (alone[end] - alone[begin]) / ONE_STEP_IN
