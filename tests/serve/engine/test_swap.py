"""Weights are exchanged between two steps: nothing is lost, and each token is made by one model or the other."""

from __future__ import annotations

import random

import pytest

from serve.engine.engine import Engine
from serve.engine.swap import Swap, Weights
from serve.errors import Loading
from serve.types import Event, Generation, RequestFailed, SequenceFinished
from tests.serve.engine.engines import Clock, ids_of, make_engine, make_request, run
from tests.serve.fake_executor import FakeExecutor, expected_tokens, fake_facts

pytestmark = pytest.mark.usefixtures("either_way")


def to(number: int, *, patience_seconds: float = 1_000.0) -> Swap:
    return Swap(Weights(number, 10 * number), patience_seconds)


def finish_of(events: list[Event], name: str, index: int = 0) -> SequenceFinished:
    (found,) = [e for e in events if isinstance(e, SequenceFinished) and (e.request_id, e.index) == (name, index)]
    return found


def expect_each_token_made_by_the_weights_told(
    events: list[Event], request: Generation, index: int = 0, *, vocab_size: int = 1000
) -> None:
    """The sequence's tokens are, from each exchange on, what those weights give after all tokens before."""
    ids = ids_of(events, request.request_id, index)
    finish = finish_of(events, request.request_id, index)
    assert len(ids) == request.stopping.max_new_tokens == finish.usage.completion_tokens
    firsts = [made.first_token for made in finish.made_by]
    assert firsts[0] == 0
    for made, end in zip(finish.made_by, [*firsts[1:], len(ids)], strict=True):
        weights = (made.checkpoint_step or 0) // 10
        known = (*request.prompt_ids, *ids[: made.first_token])
        # The seed of the fake model stands for all that sampling depends on.
        expected = expected_tokens(known, end - made.first_token, index=index, weights=weights, vocab_size=vocab_size)
        assert ids[made.first_token : end] == expected


def steps(engine: Engine, count: int) -> list[Event]:
    events: list[Event] = []
    for _ in range(count):
        events += engine.step()
        engine.check()
    return events


def test_sequences_in_flight_go_on_with_the_new_weights_from_the_tokens_they_have() -> None:
    engine = make_engine()
    requests = [make_request(name, prompt=(1, 2, 3, order), max_new=20) for order, name in enumerate("abcd")]
    for request in requests:
        engine.add(request)
    events = steps(engine, 6)
    engine.swap(to(1))
    events += run(engine)
    swapped = engine.take_swapped()
    assert swapped is not None
    assert (swapped.refused, swapped.num_recomputed) == ("", 4)
    assert engine.take_swapped() is None, "told once"
    for request in requests:
        expect_each_token_made_by_the_weights_told(events, request)
        assert [made.checkpoint_step for made in finish_of(events, request.request_id).made_by] == [None, 10]
    assert engine.stats().preemptions == 0, "nothing made room for anything"


def test_what_the_prefix_cache_held_is_not_found_by_the_new_weights() -> None:
    engine = make_engine()
    prompt = tuple(range(1, 41))
    engine.add(make_request("before", prompt=prompt))
    run(engine)
    engine.swap(to(1))
    engine.add(make_request("after", prompt=prompt))
    events = run(engine)
    assert finish_of(events, "after").usage.cached_tokens == 0
    assert ids_of(events, "after") == expected_tokens(prompt, 4, weights=1)


def test_an_engine_without_requests_exchanges_at_once() -> None:
    engine = make_engine()
    engine.swap(to(3))
    assert engine.has_work
    assert engine.step() == ()
    assert engine.take_swapped() is not None
    assert not engine.has_work


def test_weights_that_the_ranks_refuse_leave_the_ones_before() -> None:
    executor = FakeExecutor()
    executor.refused_weights[1] = "numbers that are none"
    engine = make_engine(executor=executor)
    request = make_request(max_new=12)
    engine.add(request)
    events = steps(engine, 4)
    engine.swap(to(1))
    events += run(engine)
    swapped = engine.take_swapped()
    assert swapped is not None
    assert swapped.refused == "numbers that are none"
    assert ids_of(events) == expected_tokens(request.prompt_ids, 12)
    assert len(finish_of(events, "a").made_by) == 1


def test_a_pinned_request_that_began_ends_on_its_weights_and_others_pass_those_that_did_not() -> None:
    engine = make_engine()
    pinned = make_request("pinned", max_new=10, pin_weights=True)
    engine.add(pinned)
    events = steps(engine, 3)
    engine.swap(to(1))
    late, free = make_request("late", max_new=3, pin_weights=True), make_request("free", max_new=3)
    engine.add(late)
    engine.add(free)
    events += run(engine)
    assert ids_of(events, "pinned") == expected_tokens(pinned.prompt_ids, 10)
    assert [made.checkpoint_step for made in finish_of(events, "free").made_by] == [None], "it did not wait"
    assert ids_of(events, "late") == expected_tokens(late.prompt_ids, 3, weights=1)


def test_a_pinned_request_that_takes_too_long_ends_and_the_exchange_goes_on() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    engine.add(make_request("pinned", max_new=200, pin_weights=True))
    free = make_request("free", max_new=12)
    engine.add(free)
    events = steps(engine, 3)
    engine.swap(to(1, patience_seconds=clock.now + 5))
    events += steps(engine, 2)
    assert engine.take_swapped() is None
    clock.now += 5
    events += run(engine)
    (failed,) = [e for e in events if isinstance(e, RequestFailed)]
    assert failed.request_id == "pinned"
    assert isinstance(failed.error, Loading)
    expect_each_token_made_by_the_weights_told(events, free)
    assert len(finish_of(events, "free").made_by) == 2


def test_a_request_that_is_aborted_while_it_is_set_aside_is_gone() -> None:
    engine = make_engine()
    engine.add(make_request("pinned", max_new=8, pin_weights=True))
    steps(engine, 2)
    engine.swap(to(1))
    engine.add(make_request("late", pin_weights=True))
    steps(engine, 1)
    assert engine.abort(make_request("late").request_id, Loading("no"))
    events = run(engine)
    assert not ids_of(events, "late")


@pytest.mark.parametrize("seed", range(40))
def test_random_exchanges_under_random_requests_lose_and_mix_up_nothing(seed: int) -> None:
    """Every other time texts repeat themselves by chance, and tokens are proposed."""
    rng = random.Random(seed)
    speculates, vocab_size = seed % 2, 3 if seed % 2 else 1000
    facts = fake_facts(num_blocks=rng.choice((24, 64)), vocab_size=vocab_size)
    limits = {"max_num_seqs": rng.choice((2, 8)), "max_step_tokens": rng.choice((8, 64)), "speculative_tokens": 4 * speculates}
    engine = make_engine(facts, **limits)
    requests: list[Generation] = []
    events: list[Event] = []
    number, under_way = 0, False
    for turn in range(150):
        if rng.random() < 0.15:
            prompt = tuple(rng.choice((1, 2)) for _ in range(rng.randint(1, 20)))
            request = make_request(
                f"r{turn}", prompt=prompt, max_new=rng.randint(1, 30), pin_weights=rng.random() < 0.3,
                num_sequences=rng.choice((1, 1, 3)),
            )  # fmt: skip
            requests.append(request)
            engine.add(request)
        if not under_way and rng.random() < 0.08:
            number, under_way = number + 1, True
            engine.swap(to(number))
        events += steps(engine, 1)
        under_way = under_way and engine.take_swapped() is None
    events += run(engine)
    assert not any(isinstance(event, RequestFailed) for event in events)
    for request in requests:
        for index in range(request.num_sequences):
            expect_each_token_made_by_the_weights_told(events, request, index, vocab_size=vocab_size)
            if request.pin_weights:
                assert len(finish_of(events, request.request_id, index).made_by) == 1
    assert engine.stats().kv_blocks_used == 0
    assert (engine.stats().accepted_tokens > 0) == bool(speculates)
