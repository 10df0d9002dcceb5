"""Places that a tenant left to others and gets back: how much, for how long, and that nothing goes to and fro."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from serve.engine.credit import LEAST, MOST, Credit
from serve.engine.engine import Engine
from serve.engine.first_tokens import ONE_STEP_IN
from serve.types import Event, SequenceFinished
from tests.serve.engine.engines import ids_of, make_engine, make_request
from tests.serve.engine.test_places import tenants_of
from tests.serve.fake_executor import FakeExecutor, expected_tokens, fake_facts

BOTH = {"flood", "other"}
ROOMY = fake_facts(num_blocks=1024)


def loans(credit: Credit, having: dict[str, int], *waiting: str, share: int = 4) -> dict[str, int]:
    return credit.loans(having, set(waiting), having.keys() | set(waiting), share)


def test_places_are_lent_once_enough_was_saved_and_until_nothing_is_left() -> None:
    credit = Credit()
    flooded, lent = {"flood": 8}, {"flood": 2, "other": 6}
    for _ in range(LEAST - 1):
        credit.note_step(flooded, BOTH, 4)
    assert loans(credit, {"flood": 4, "other": 4}, *BOTH) == {}
    credit.note_step(flooded, BOTH, 4)
    assert loans(credit, {"flood": 4, "other": 4}, *BOTH) == {"flood": -1, "other": 1}
    for _ in range(2 * LEAST - 1):
        credit.note_step(lent, BOTH, 4)
        assert loans(credit, lent, *BOTH) == {"flood": -2, "other": 2}, "half of its share is the most that the flood lends"
    credit.note_step(lent, BOTH, 4)
    assert loans(credit, lent, *BOTH) == {}, "all is given back"
    credit.note_step({"flood": 5, "other": 3}, BOTH, 4)
    assert loans(credit, {"flood": 4, "other": 4}, *BOTH) == {}, "one place is not enough to lend again"


def test_nothing_is_lent_to_who_does_not_want_it() -> None:
    credit = Credit()
    three = BOTH | {"third"}
    for _ in range(LEAST):
        credit.note_step({"flood": 9, "third": 3}, three, 4)
    assert credit._balances == {"flood": -40, "third": 8, "other": 32}
    for _ in range(16):
        credit.note_step({"flood": 6, "third": 6}, three, 4)
    assert loans(credit, {"flood": 6, "third": 5, "other": 1}, "flood", "third") == {}
    assert loans(credit, {"flood": 6, "third": 3, "other": 3}, *three) == {}, "its own share is enough"
    assert loans(credit, {"flood": 5, "third": 3, "other": 4}, *three) == {"flood": -1, "third": 0, "other": 1}
    assert loans(credit, {"flood": 4, "third": 3, "other": 6}, *three) == {"flood": -2, "third": -1, "other": 3}
    assert loans(credit, {"flood": 4, "third": 3, "other": 6}, "flood") == {"flood": -1, "third": -1, "other": 2}


def test_no_more_is_saved_or_owed_than_so_many_steps_and_an_account_rests_meanwhile() -> None:
    credit = Credit()
    for _ in range(10 * MOST):
        credit.note_step({"flood": 8}, BOTH, 4)
    for _ in range(100):
        credit.note_step({"flood": 6, "third": 2}, {"flood", "third"}, 4)
    having, steps = {"flood": 2, "other": 6}, 0
    while loans(credit, having):
        credit.note_step(having, BOTH, 4)
        steps += 1
    assert steps == 2 * MOST


@pytest.mark.parametrize("seed", range(4))
def test_what_is_lent_is_what_is_borrowed(seed: int) -> None:
    rng = random.Random(seed)
    credit = Credit()
    times = 0
    for _ in range(4000):
        tenants = set(rng.sample("abcdefg", rng.randint(2, 7)))
        places = rng.randint(2, 40)
        share = max(1, places // len(tenants))
        having = {tenant: rng.randint(0, 3 * share if tenant in "ab" else share + 2) for tenant in tenants}
        waiting = {tenant for tenant in tenants if rng.random() < 0.7}
        credit.note_step(having, tenants, share)
        credit.check()
        lent = credit.loans(having, waiting, tenants, share)
        assert lent.keys() <= tenants
        assert sum(lent.values()) == 0
        assert all(-places <= share // 2 for places in lent.values())
        assert all(places <= max(0, having[tenant] - share + (tenant in waiting)) for tenant, places in lent.items())
        times += any(lent.values())
    assert times > 100


def test_accounts_of_tenants_that_went_are_forgotten_when_there_are_too_many() -> None:
    credit = Credit()
    for number in range(5000):
        credit.note_step({"flood": 8}, {"flood", f"other{number}"}, 4)
    assert len(credit._balances) < 1100
    assert credit._balances["flood"] == -4 * MOST


def test_where_each_has_one_place_nothing_is_noted() -> None:
    credit = Credit()
    for _ in range(LEAST):
        credit.note_step({"flood": 2}, BOTH, 1)
    assert not credit._balances
    assert loans(credit, {"flood": 2}, *BOTH, share=1) == {}


def crowded(executor: FakeExecutor | None = None) -> tuple[Engine, list[Event]]:
    """An engine of four places: one tenant has taken what another, whose only sequence runs, has left of its two."""
    engine = make_engine(ROOMY, executor=executor, max_num_seqs=4, max_queued_tokens=100_000)
    engine.add(make_request("first", (7, 8), max_new=200, tenant="other"))
    for number in range(12):
        engine.add(make_request(f"flood{number}", (number + 1,) * 3, max_new=120, tenant="flood"))
    events = [event for _ in range(2 * LEAST + 2) for event in engine.step()]
    assert tenants_of(engine) == ["flood", "flood", "flood", "other"]
    return engine, events


def test_a_tenant_that_had_fewer_places_than_its_share_has_more_when_it_wants_them() -> None:
    engine, events = crowded()
    for number in range(3):
        engine.add(make_request(f"other{number}", (7, number), max_new=60, tenant="other"))
    events += [event for _ in range(2) for event in engine.step()]
    assert tenants_of(engine) == ["flood", "other", "other", "other"], "half of the flood's share is lent"
    lent = 0
    while tenants_of(engine) == ["flood", "other", "other", "other"]:
        events += engine.step()
        engine.check()
        lent += 1
    assert lent == 2 * LEAST + 1, "what was saved is 33 places by steps, and the flood takes its own back after them"
    assert tenants_of(engine) == ["flood", "flood", "other", "other"]
    gave_way = engine._scheduler.gave_way
    for _ in range(LEAST):
        events += engine.step()
    assert engine._scheduler.gave_way == gave_way, "nothing goes to and fro"
    while engine.has_work:
        events += engine.step()
        engine.check()
    for number in range(3):
        assert ids_of(events, f"other{number}") == expected_tokens((7, number), 60)
    assert ids_of(events, "first") == expected_tokens((7, 8), 200)
    for number in range(12):
        assert ids_of(events, f"flood{number}") == expected_tokens((number + 1,) * 3, 120)
    assert sum(isinstance(event, SequenceFinished) for event in events) == 16


def test_nothing_is_saved_while_nobody_waits() -> None:
    engine = make_engine(ROOMY, max_num_seqs=4)
    for number in range(3):
        engine.add(make_request(f"flood{number}", (number + 1,) * 3, max_new=200, tenant="flood"))
    engine.add(make_request("first", (7, 8), max_new=200, tenant="other"))
    for _ in range(4 * LEAST):
        engine.step()
    for number in range(3):
        engine.add(make_request(f"other{number}", (7, number), max_new=60, tenant="other"))
    engine.step()
    assert tenants_of(engine) == ["flood", "flood", "other", "other"]


def test_the_rows_of_those_that_lend_are_left_out_for_a_first_token_beyond_the_share() -> None:
    executor = FakeExecutor(ROOMY)
    engine, _ = crowded(executor)
    engine.add(make_request("second", (7, 1), max_new=200, tenant="other"))
    engine.step()
    for _ in range(2 * ONE_STEP_IN):  # in which nobody begins, so that rows may be left out again
        engine.step()
    engine.add(make_request("third", (7, 2), max_new=5, tenant="other"))
    engine.step()
    given = executor.given[-1]
    third = next(seq for seq in engine._scheduler.running.values() if seq.request.generation.request_id == "third")
    flood = {seq.id for seq in engine._scheduler.running.values() if seq.tenant == "flood"}
    assert third.id in {span.sequence for span in given.spans}
    assert not flood & {span.sequence for span in given.spans}


def test_two_that_flood_share_while_a_third_with_credit_wants_nothing() -> None:
    engine = make_engine(ROOMY, max_num_seqs=12, max_queued_requests=1000, max_queued_tokens=100_000)
    engine.add(make_request("light", (7, 8), max_new=1000, tenant="light"))
    for tenant in ("b", "c"):
        for number in range(60):
            engine.add(make_request(f"{tenant}{number}", (number + 1, 3), max_new=20, tenant=tenant))
        for _ in range(4 * LEAST):
            engine.step()
    for _ in range(4 * LEAST):
        engine.step()
        engine.check()
        assert Counter(tenants_of(engine))["c"] >= 4, "what was not asked for is lent to nobody"
