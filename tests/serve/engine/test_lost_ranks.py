"""The ranks die under an engine that goes on with others: nothing is lost, nothing is told twice, and all of it is exact."""

from __future__ import annotations

import dataclasses

import pytest

from serve.engine.engine import MOST_DEATHS, Engine
from serve.engine.executor import ExecutorDied, ModelFacts
from serve.engine.swap import Swap, Weights
from serve.errors import EngineDown, InvalidRequest, Loading, RequestAborted
from serve.types import Event, PromptReady, RequestFailed, RequestId, ResponseOptions, SamplingParams, SequenceFinished
from tests.serve.engine.engines import ids_of, make_engine, make_request, run
from tests.serve.fake_executor import FakeExecutor, expected_tokens, fake_facts

GONE = EngineDown("the ranks died")

pytestmark = pytest.mark.usefixtures("either_way")


def die(engine: Engine, executor: FakeExecutor) -> None:
    """The ranks die in the middle of a step."""
    executor.dies_at_step = 0
    with pytest.raises(ExecutorDied):
        engine.step()


def revive(engine: Engine, facts: ModelFacts | None = None, *, same_weights: bool = True) -> FakeExecutor:
    """Others come."""
    facts = facts or fake_facts()
    executor = FakeExecutor(facts)
    engine.revive(facts, executor, same_weights=same_weights)
    engine.check()
    return executor


def failures(events: list[Event]) -> dict[str, Exception]:
    return {event.request_id: event.error for event in events if isinstance(event, RequestFailed)}


def started(*names: str, steps: int = 3, **more: object) -> tuple[Engine, FakeExecutor, list[Event]]:
    """An engine in whose requests, of 12 tokens, so many steps were computed."""
    executor = FakeExecutor()
    engine = make_engine(executor=executor)
    for name in names:
        engine.add(make_request(name, max_new=12, **more))
    events: list[Event] = []
    for _ in range(steps):
        events += engine.step()
    return engine, executor, events


def test_streams_go_on_where_they_were() -> None:
    engine, executor, events = started("a", "b")
    die(engine, executor)
    engine.lose_ranks(GONE, resume=True)
    engine.check()
    assert engine.drain_events() == (), "there is nothing to tell"
    revive(engine)
    events += run(engine)
    for name in "ab":
        assert ids_of(events, name) == expected_tokens((1, 2, 3), 12)
        assert sum(isinstance(event, PromptReady) and event.request_id == name for event in events) == 1
        assert sum(isinstance(event, SequenceFinished) and event.request_id == name for event in events) == 1
    assert engine.stats().generation_tokens == 24
    assert engine.stats().preemptions == 0


def test_what_was_sampled_by_a_seed_stays_what_it_would_have_been() -> None:
    engine, executor, events = started("a", sampling=SamplingParams(seed=5), num_sequences=3)
    die(engine, executor)
    engine.lose_ranks(GONE, resume=True)
    revive(engine)
    events += run(engine)
    for index in range(3):
        assert ids_of(events, "a", index) == expected_tokens((1, 2, 3), 12, seed=5, index=index)


def test_logprobs_of_a_prompt_that_was_half_computed_are_told_whole() -> None:
    prompt = tuple(range(1, 100))
    whole = make_engine(executor=FakeExecutor(), max_step_tokens=16)
    executor = FakeExecutor()
    engine = make_engine(executor=executor, max_step_tokens=16)
    asked = make_request(prompt=prompt, response=ResponseOptions(prompt_logprobs=2))
    told = []
    for each in (whole, engine):
        each.add(asked)
    engine.step()
    die(engine, executor)
    engine.lose_ranks(GONE, resume=False)
    revive(engine)
    for each in (whole, engine):
        (ready,) = [event for event in run(each) if isinstance(event, PromptReady)]
        told.append(ready.logprobs)
    assert told[0] == told[1]
    assert len(told[0]) == len(prompt)


def test_without_resume_only_what_generated_nothing_goes_on() -> None:
    engine, executor, events = started("said", steps=2)
    engine.add(make_request("waits", prompt=(9, 8, 7)))
    engine.add(make_request("computed", prompt=tuple(range(1, 150))))
    while not ids_of(events, "waits"):
        events += engine.step()
    engine.add(make_request("later", prompt=(4, 4)))
    die(engine, executor)
    engine.lose_ranks(GONE, resume=False)
    assert failures(list(engine.drain_events())) == {"said": GONE, "waits": GONE}
    revive(engine)
    events = run(engine)
    assert ids_of(events, "computed") == expected_tokens(tuple(range(1, 150)), 4)
    assert ids_of(events, "later") == expected_tokens((4, 4), 4)


def test_one_of_several_sequences_that_has_ended_counts_as_said() -> None:
    engine, executor, _ = started("a", steps=0, sampling=SamplingParams(), num_sequences=1)
    assert not engine._registry.requests[0].has_output
    engine.step()
    assert engine._registry.requests[0].has_output
    die(engine, executor)


def test_what_was_computed_in_three_deaths_without_a_token_ends() -> None:
    """It may be what kills them."""
    engine, executor, _ = started("kills", steps=0)
    engine.add(make_request("waits", prompt=tuple(range(1, 200)), priority=-1))
    for death in range(1, MOST_DEATHS + 1):
        die(engine, executor)
        engine.lose_ranks(GONE, resume=True)
        failed = failures(list(engine.drain_events()))
        assert ("kills" in failed) == (death == MOST_DEATHS)
        executor = revive(engine)
    assert len(engine.request_ids) <= 1


def test_a_token_in_between_forgives_the_deaths_before() -> None:
    engine, executor, events = started("a", steps=1)
    for _ in range(2 * MOST_DEATHS):
        die(engine, executor)
        engine.lose_ranks(GONE, resume=True)
        executor = revive(engine)
        events += engine.step()
    events += run(engine)
    assert ids_of(events) == expected_tokens((1, 2, 3), 12)


def test_ranks_with_fewer_blocks_take_what_fits_and_refuse_the_rest() -> None:
    engine, executor, events = started("short", steps=2)
    engine.add(make_request("long", prompt=tuple(range(1, 150)), max_new=60))
    events += engine.step()
    die(engine, executor)
    engine.lose_ranks(GONE, resume=True)
    revive(engine, fake_facts(num_blocks=8))
    events += run(engine)
    error = failures(events)["long"]
    assert isinstance(error, InvalidRequest)
    assert "the KV cache holds 32 positions" in str(error)
    assert ids_of(events, "short") == expected_tokens((1, 2, 3), 12)


def test_other_weights_go_on_with_all_but_those_that_asked_for_the_same() -> None:
    engine, executor, events = started("free", steps=0)
    engine.add(make_request("pinned", max_new=12, pin_weights=True))
    events += [*engine.step(), *engine.step()]
    engine.add(make_request("pinned later", pin_weights=True))
    die(engine, executor)
    engine.lose_ranks(GONE, resume=True)
    facts = dataclasses.replace(fake_facts(), checkpoint_step=30)
    revive(engine, facts, same_weights=False)
    events += run(engine)
    assert [(name, type(error)) for name, error in failures(events).items()] == [("pinned", Loading)]
    made = {event.request_id: event.made_by for event in events if isinstance(event, SequenceFinished)}
    assert [(part.first_token, part.checkpoint_step) for part in made[RequestId("free")]] == [(0, None), (2, 30)]
    assert [part.checkpoint_step for part in made[RequestId("pinned later")]] == [30]


def test_an_exchange_of_weights_that_waited_is_off() -> None:
    engine, executor, events = started("a", pin_weights=True)
    engine.swap(Swap(Weights(1, 10), 1_000.0))
    engine.add(make_request("b", pin_weights=True))
    die(engine, executor)
    engine.lose_ranks(GONE, resume=True)
    revive(engine)
    events += run(engine)
    assert engine.take_swapped() is None
    assert ids_of(events, "a") == expected_tokens((1, 2, 3), 12)
    assert ids_of(events, "b") == expected_tokens((1, 2, 3), 4)


def test_what_was_sent_ahead_is_lost_with_the_rest_and_computed_again() -> None:
    """They die over the first of two steps, and again as the second is sent."""
    engine = make_engine(executor=(first := FakeExecutor()), async_scheduling=True)
    for name in "ab":
        engine.add(make_request(name, max_new=12, sampling=SamplingParams(seed=3), num_sequences=2))
    events = [*engine.step(), *engine.step()]
    sent = len(vars(first)["launched"])
    die(engine, first)
    assert (sent, len(vars(first)["launched"])) == (1, 1), "two were under way, and one of them was never computed"
    engine.lose_ranks(GONE, resume=True)
    second = revive(engine)
    events += engine.step()

    def launch(_: object, *, overtakes: bool = False) -> None:
        raise ExecutorDied("a rank is gone")

    second.launch = launch  # type: ignore[method-assign]
    with pytest.raises(ExecutorDied):
        engine.step()
    engine.lose_ranks(GONE, resume=True)
    revive(engine)
    events += run(engine)
    for name in "ab":
        for index in range(2):
            assert ids_of(events, name, index) == expected_tokens((1, 2, 3), 12, seed=3, index=index)
    assert engine.stats().generation_tokens == 48


def test_requests_come_and_go_while_there_are_no_ranks() -> None:
    engine, executor, events = started("a", "b")
    die(engine, executor)
    engine.lose_ranks(GONE, resume=True)
    engine.add(make_request("c"))
    engine.abort(RequestId("a"), RequestAborted("it is not wanted"))
    engine.check()
    revive(engine)
    events += run(engine)
    assert list(failures(events)) == ["a"]
    assert ids_of(events, "b") == expected_tokens((1, 2, 3), 12)
    assert ids_of(events, "c") == expected_tokens((1, 2, 3), 4)
