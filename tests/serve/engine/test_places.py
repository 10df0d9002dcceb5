"""Places of the running batch among tenants: who begins at once, who gives way, and how often."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from serve.engine.engine import Engine
from serve.types import SequenceFinished, TokensOut
from tests.serve.engine.engines import ids_of, make_engine, make_request
from tests.serve.fake_executor import expected_tokens, fake_facts


def tenants_of(engine: Engine) -> list[str]:
    return sorted(seq.tenant for seq in engine._scheduler.running.values())


def flooded(count: int = 12, *, prompt: int = 3, max_new: int = 40, **limits: int) -> Engine:
    """An engine whose places one tenant has taken."""
    engine = make_engine(**({"max_num_seqs": 4} | limits))
    for number in range(count):
        engine.add(make_request(f"flood{number}", (number + 1,) * prompt, max_new=max_new, tenant="flood"))
    engine.step()
    return engine


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_tenant_with_less_than_its_share_begins_at_once(*, runs_ahead: bool) -> None:
    engine = flooded(async_scheduling=runs_ahead)
    for _ in range(6):
        engine.step()
    assert tenants_of(engine) == ["flood"] * 4
    for number in range(3):
        engine.add(make_request(f"other{number}", (7, number), max_new=30, tenant="other"))
    events = [event for _ in range(3 + runs_ahead) for event in engine.step()]
    begun = {event.request_id for event in events if isinstance(event, TokensOut) and event.request_id.startswith("other")}
    assert begun == {"other0", "other1"}, "two of four places are its share"
    assert tenants_of(engine) == ["flood", "flood", "other", "other"]
    assert engine.stats().preemptions == 2
    while engine.has_work:
        events += engine.step()
        engine.check()
    assert engine.stats().recomputed.fair_share > 0
    assert engine.stats().recomputed.preempted == 0
    for number in range(3):
        assert ids_of(events, f"other{number}") == expected_tokens((7, number), 30)


def test_what_gave_way_says_the_same_and_waits_before_the_rest() -> None:
    engine = flooded()
    events = [event for _ in range(6) for event in engine.step()]
    engine.add(make_request("other", (7,), max_new=2, tenant="other"))
    while engine.has_work:
        events += engine.step()
        engine.check()
    ends = [event.request_id for event in events if isinstance(event, SequenceFinished)]
    assert ends[:5] == ["other", "flood0", "flood1", "flood2", "flood3"], "the newest gave way, and went on first"
    for number in range(12):
        told = [token for event in events if isinstance(event, TokensOut) and event.request_id == f"flood{number}"
                for token in event.token_ids]  # fmt: skip
        assert told[-34:] == expected_tokens((number + 1,) * 3, 40)[-34:]


def test_nobody_gives_way_to_a_tenant_that_has_its_share_or_to_smaller_priority_or_where_all_are_one() -> None:
    engine = flooded()
    for number in range(4):
        engine.add(make_request(f"other{number}", (7, number), max_new=40, tenant="other"))
    for _ in range(10):
        engine.step()
        engine.check()
    assert engine.stats().preemptions == 2
    for more in ({"tenant": "other", "priority": -1}, {"tenant": "flood"}, {"tenant": "flood", "priority": 1}):
        for count in (4, 12):
            engine = flooded(count)
            engine.add(make_request("more", **more))
            engine.step()
            assert engine.stats().preemptions == 0
    engine = make_engine(max_num_seqs=2)
    for tenant in ("a", "b", "c"):
        engine.add(make_request(tenant, tenant=tenant))
        engine.step()
    assert tenants_of(engine) == ["a", "b"], "with more tenants than places the share of each is one"


def test_a_sequence_gives_way_again_only_when_it_is_twice_as_long() -> None:
    engine = flooded(2, max_new=100, max_num_seqs=2)
    made = 0
    while "flood0" in engine.request_ids:
        if tenants_of(engine) == ["flood"] * 2 and len(engine.request_ids) == 2:
            engine.add(make_request(f"other{made}", (7, 7, made), max_new=1, tenant="other"))
            made += 1
        engine.step()
        engine.check()
    assert 4 <= engine._scheduler.gave_way <= 2 * 7, "two sequences of 103 positions"


def test_a_long_prompt_gives_way_to_a_short_one_and_goes_on_where_it_was() -> None:
    facts = fake_facts(num_blocks=256)
    engine = make_engine(facts, max_step_tokens=16)
    engine.add(make_request("long", tuple(range(200)), max_new=2, tenant="flood"))
    for _ in range(3):
        engine.step()
    engine.add(make_request("short", (7, 8), max_new=2, tenant="other"))
    events = list(engine.step())
    assert [event.request_id for event in events if isinstance(event, TokensOut)] == ["short"]
    while engine.has_work:
        events += engine.step()
        engine.check()
    assert ids_of(events, "long") == expected_tokens(range(200), 2)
    assert engine.stats().recomputed.fair_share == 0, "the prefix cache had kept what was computed"


def test_blocks_are_shared_likewise() -> None:
    engine = flooded(count=2, prompt=116, max_new=40, max_num_seqs=8)  # of 64 blocks of 4, each takes 29 and grows
    for _ in range(5):
        engine.step()
    assert tenants_of(engine) == ["flood", "flood"]
    engine.add(make_request("other", (7,) * 40, max_new=4, tenant="other"))
    engine.step()
    engine.check()
    assert tenants_of(engine) == ["flood", "other"]
    engine.add(make_request("too large a part", (9,) * 130, max_new=4, tenant="other"))
    engine.step()
    assert tenants_of(engine) == ["flood", "other"], "more than half of the blocks is more than its share"


@pytest.mark.parametrize("seed", range(4))
def test_what_is_computed_anew_for_others_is_bounded_however_tenants_come_and_go(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(max_num_seqs=rng.randint(2, 6), prefix_caching=False, async_scheduling=bool(seed % 2))
    lengths: dict[str, int] = {}
    waits: Counter[str] = Counter()
    for number in range(600):
        if rng.random() < 0.3 and len(lengths) < 120:
            tenant = rng.choice(("a", "a", "a", "b", f"c{number % 5}"))
            prompt, max_new = rng.randint(1, 12), rng.randint(1, 30)
            lengths[f"r{number}"] = prompt + max_new
            request = make_request(f"r{number}", tuple(rng.choices(range(50), k=prompt)), max_new=max_new, tenant=tenant)
            engine.add(request)
        engine.step()
        engine.check()
        for seq in engine._scheduler.running.values():
            waits[seq.request.generation.request_id] = max(waits[seq.request.generation.request_id], seq.gives_way_from)
    while engine.has_work:
        engine.step()
    anew = sum(waits[name] for name in lengths)
    assert 0 < engine.stats().recomputed.fair_share <= anew
    assert all(waits[name] <= 2 * length for name, length in lengths.items())
    assert engine.stats().preemptions <= sum(max(0, gives).bit_length() for gives in waits.values())


def test_the_first_of_the_queue_is_not_passed_while_its_own_tenant_has_less_than_its_share() -> None:
    engine = make_engine(prefix_caching=False)
    engine.add(make_request("large", (1,) * 150, max_new=30, tenant="a"))
    for _ in range(4):
        engine.step()
    engine.add(make_request("larger than is free", (2,) * 140, max_new=2, tenant="b"))
    engine.step()
    engine.add(make_request("small", (3,), max_new=2, tenant="c"))
    engine.step()
    assert tenants_of(engine) == ["a"]
