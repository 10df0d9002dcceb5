"""Places that a tenant left to others and gets back: how much, for how long, and that nothing goes to and fro."""

from __future__ import annotations

import random

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


def test_places_are_lent_once_enough_was_saved_and_until_nothing_is_left() -> None:
    credit = Credit()
    for _ in range(LEAST - 1):
        credit.note_step({"flood": 8}, BOTH, 4)
    assert credit.dues(BOTH, 4) == {"flood": 4, "other": 4}
    credit.note_step({"flood": 8}, BOTH, 4)
    assert credit.dues(BOTH, 4) == {"flood": 2, "other": 6}
    for _ in range(2 * LEAST - 1):
        credit.note_step({"flood": 2, "other": 6}, BOTH, 4)
        assert credit.dues(BOTH, 4) == {"flood": 2, "other": 6}
    credit.note_step({"flood": 2, "other": 6}, BOTH, 4)
    assert credit.dues(BOTH, 4) == {"flood": 4, "other": 4}, "all is given back"
    credit.note_step({"flood": 5, "other": 3}, BOTH, 4)
    assert credit.dues(BOTH, 4) == {"flood": 4, "other": 4}, "one place is not enough to lend again"


def test_no_more_is_saved_or_owed_than_so_many_steps_and_an_account_rests_meanwhile() -> None:
    credit = Credit()
    for _ in range(10 * MOST):
        credit.note_step({"flood": 8}, BOTH, 4)
    for _ in range(100):
        credit.note_step({"flood": 6, "third": 2}, {"flood", "third"}, 4)
    steps = 0
    while credit.may_borrow("other"):
        credit.note_step({"flood": 2, "other": 6}, BOTH, 4)
        steps += 1
    assert steps == 2 * MOST


@pytest.mark.parametrize("seed", range(4))
def test_what_is_due_is_never_more_than_there_is(seed: int) -> None:
    rng = random.Random(seed)
    credit = Credit()
    lent = 0
    for _ in range(4000):
        tenants = set(rng.sample("abcdefg", rng.randint(2, 7)))
        places = rng.randint(2, 40)
        share = max(1, places // len(tenants))
        having = {tenant: rng.randint(0, 3 * share if tenant in "ab" else share) for tenant in tenants}
        credit.note_step(having, tenants, share)
        credit.check()
        dues = credit.dues(tenants, share)
        assert dues.keys() == tenants
        assert sum(dues.values()) <= share * len(tenants)
        assert all(share - share // 2 <= due for due in dues.values())
        lent += dues != dict.fromkeys(tenants, share)
    assert lent > 100


def test_accounts_of_tenants_that_went_are_forgotten_when_there_are_too_many() -> None:
    credit = Credit()
    for number in range(5000):
        credit.note_step({"flood": 8}, {"flood", f"other{number}"}, 4)
    assert len(credit._balances) < 1100
    assert credit.owes("flood")


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
