"""Requests that are refused, wait, or end before they are done."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Callable

import pytest

from serve.engine.executor import ExecutorDied, ModelFacts
from serve.engine.plan import Sampled, StepPlan, StepResult
from serve.engine.text import TextDelta
from serve.errors import DeadlineExpired, DuplicateRequest, EngineDown, InvalidRequest, QueueFull, RequestAborted, RequestBroke
from serve.types import Generation, RequestFailed, RequestId, SequenceFinished
from tests.serve.engine.engines import Clock, ids_of, make_engine, make_request, run
from tests.serve.fake_executor import Deferred, FakeExecutor, expected_tokens, fake_facts
from tests.serve.fake_text import LetterStream


def test_what_can_never_fit_is_refused_with_the_field() -> None:
    engine = make_engine(fake_facts(max_model_len=16, num_blocks=3, block_tokens=4))
    cases = [
        (make_request(prompt=()), "prompt", "no tokens"),
        (make_request(prompt=tuple(range(17)), max_new=0), "prompt", "the model has 16 positions"),
        (make_request(prompt=tuple(range(16)), max_new=1), "prompt", "the model has 16 positions"),
        (make_request(prompt=tuple(range(10)), max_new=7), "stopping.max_new_tokens", "the model has 16 positions"),
        (make_request(prompt=tuple(range(13)), max_new=0), "prompt", "the KV cache holds 12 positions"),
        (make_request(prompt=tuple(range(10)), max_new=4), "stopping.max_new_tokens", "the KV cache holds 12 positions"),
        (make_request(max_new=-1), "stopping.max_new_tokens", "negative"),
        (make_request(num_sequences=0), "sampling.num_sequences", "at least 1"),
    ]
    for generation, field, rule in cases:
        with pytest.raises(InvalidRequest, match=rule) as caught:
            engine.add(generation)
        assert caught.value.violations[0].field == field
    assert not engine.has_work
    engine.add(make_request(prompt=tuple(range(10)), max_new=3))
    assert len(ids_of(run(engine))) == 3


def test_an_id_may_be_used_again_when_its_request_has_ended() -> None:
    engine = make_engine()
    engine.add(make_request())
    with pytest.raises(DuplicateRequest, match="'a' is still alive"):
        engine.add(make_request())
    run(engine)
    engine.add(make_request())
    assert ids_of(run(engine)) == expected_tokens((1, 2, 3), 4)


def test_a_full_queue_says_which_limit_and_when_to_come_back() -> None:
    clock = Clock()
    facts = fake_facts()

    def four_seconds(plan: StepPlan) -> None:
        clock.now += 4

    executor = FakeExecutor(facts, on_execute=four_seconds)
    engine = make_engine(facts, executor=executor, clock=clock, max_queued_requests=2, max_queued_tokens=10, max_step_tokens=4)
    engine.add(make_request("a", (1,) * 4, num_sequences=3))
    engine.add(make_request("b", (1,) * 4))
    with pytest.raises(QueueFull, match="2 requests are waiting") as full:
        engine.add(make_request("c"))
    assert (full.value.reason, full.value.retry_after_seconds) == ("requests", 1.0)
    engine.step()
    with pytest.raises(QueueFull, match="4 prompt tokens are waiting, and 7 more") as full:
        engine.add(make_request("c", (1,) * 7))
    assert (full.value.reason, full.value.retry_after_seconds) == ("tokens", 4.0)


def test_an_abort_frees_everything_at_once_and_is_told_once() -> None:
    engine = make_engine()
    engine.add(make_request("a", num_sequences=2))
    engine.add(make_request("b"))
    engine.step()
    engine.step()
    error = RequestAborted("the client went away")
    assert engine.stats().kv_blocks_used > 0
    assert engine.abort(RequestId("a"), error)
    assert engine.abort(RequestId("b"), error)
    assert not engine.abort(RequestId("a"), error)
    engine.check()
    assert engine.stats().kv_blocks_used == 0
    assert engine.has_work
    events = engine.drain_events()
    assert [(event.request_id, event.error) for event in events] == [("a", error), ("b", error)]
    # Of a the prompt and one token, then the prompt for its second sequence, of which no block was full; of b as of a's first.
    assert [event.computed_tokens for event in events] == [7, 4]
    assert [event.queue_seconds for event in events] == [100.0, 100.0], "since its arrival at 0"
    assert engine.has_work, "the ranks have not heard of it"
    assert engine.step() == ()
    assert not engine.has_work


def test_a_deadline_is_known_beforehand_and_kept_without_a_step() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    engine.add(make_request("a", deadline_seconds=130.0))
    engine.add(make_request("b", deadline_seconds=120.0))
    assert engine.next_deadline_seconds == 120.0
    clock.now = 120.0
    engine.expire()
    (failed,) = engine.drain_events()
    assert isinstance(failed, RequestFailed)
    assert failed.request_id == "b"
    assert isinstance(failed.error, DeadlineExpired)
    assert "queue" in str(failed.error)
    assert engine.next_deadline_seconds == 130.0
    run(engine)
    assert engine.next_deadline_seconds is None


def test_a_fault_ends_its_request_with_all_sequences_and_no_other() -> None:
    facts = fake_facts()
    engine = make_engine(facts, executor=FakeExecutor(facts, fault_token=999_999))
    engine.add(make_request("bad", (1, 999_999), num_sequences=3))
    engine.add(make_request("good"))
    events = run(engine)
    failures = [event for event in events if isinstance(event, RequestFailed)]
    assert [failure.request_id for failure in failures] == ["bad"]
    assert isinstance(failures[0].error, RequestBroke)
    assert "not finite" in str(failures[0].error)
    assert ids_of(events, "good") == expected_tokens((1, 2, 3), 4)
    assert engine.stats().kv_blocks_used == 0


def test_text_that_cannot_be_made_ends_its_request_and_no_other() -> None:
    class Broken(LetterStream):
        def push(self, token_id: int) -> TextDelta:
            raise ValueError(token_id)

    def open_text(generation: Generation, index: int) -> LetterStream:
        return (Broken if generation.request_id == "bad" else LetterStream)(generation)

    engine = make_engine(open_text=open_text)
    engine.add(make_request("bad"))
    engine.add(make_request("good"))
    events = run(engine)
    failures = [event for event in events if isinstance(event, RequestFailed)]
    assert [failure.request_id for failure in failures] == ["bad"]
    assert isinstance(failures[0].error, RequestBroke)
    assert isinstance(failures[0].error.__cause__, ValueError)
    assert ids_of(events, "good") == expected_tokens((1, 2, 3), 4)


def test_a_request_that_found_less_when_it_began_again_has_not_cost_less_than_nothing() -> None:
    engine = make_engine(fake_facts(num_blocks=16, block_tokens=4), max_step_tokens=4)
    prompt = tuple(range(1, 13))
    engine.add(make_request("before", prompt, 1))
    run(engine)
    engine.add(make_request("a", prompt, 4))
    engine.step()
    engine.lose_ranks(RequestAborted("gone"), resume=True)
    engine.revive(fake_facts(num_blocks=16, block_tokens=4), FakeExecutor(), same_weights=True)
    engine.step()  # of what it had found, eight positions, four are computed by now
    assert engine.abort(RequestId("a"), RequestAborted("gone"))
    failed = engine.drain_events()[-1]
    assert isinstance(failed, RequestFailed)
    assert failed.computed_tokens == 0


def test_a_request_that_ends_in_the_queue_has_cost_nothing_and_the_oldest_one_is_known() -> None:
    clock = Clock()
    engine = make_engine(clock=clock, max_num_seqs=1)
    assert engine.stats().queued_since_seconds is None
    for number, name in enumerate("abc"):
        engine.add(make_request(name, arrival_seconds=float(number)))
    assert engine.stats().queued_since_seconds == 0.0
    engine.step()
    assert engine.stats().queued_since_seconds == 1.0, "a runs"
    assert engine.abort(RequestId("b"), RequestAborted("gone"))
    assert engine.stats().queued_since_seconds == 2.0
    failed = engine.drain_events()[-1]
    assert isinstance(failed, RequestFailed)
    assert (failed.queue_seconds, failed.computed_tokens) == (None, 0)


def test_when_the_executor_dies_every_request_fails_once() -> None:
    facts = fake_facts()
    engine = make_engine(facts, executor=FakeExecutor(facts, dies_at_step=1))
    engine.add(make_request("a", num_sequences=2))
    engine.add(make_request("b"))
    assert engine.step()
    with pytest.raises(ExecutorDied):
        engine.step()
    error = EngineDown("the ranks are being restarted")
    assert [(event.request_id, event.error) for event in engine.fail_all(error)] == [("a", error), ("b", error)]
    assert engine.stats().kv_blocks_used == 0
    assert engine.request_ids == ()
    engine.check()


class Liar(Deferred):
    """Spoils the answers of an honest executor."""

    def __init__(self, facts: ModelFacts, spoil: Callable[[StepResult], StepResult]) -> None:
        self._honest = FakeExecutor(facts)
        self._spoil = spoil

    def execute(self, plan: StepPlan) -> StepResult:
        return self._spoil(self._honest.execute(plan))


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda result: dataclasses.replace(result, step=7), "step 0 was answered by step 7"),
        (lambda result: dataclasses.replace(result, sampled=()), r"tokens for \[0\] were due, and \[\] came"),
        (lambda result: dataclasses.replace(result, sampled=result.sampled * 2), "and one more came"),
        (lambda result: dataclasses.replace(result, sampled=(Sampled(sequence=9, token_id=1),)), r"and \[9\] came"),  # type: ignore[arg-type]
        (lambda result: dataclasses.replace(result, sampled=(Sampled(sequence=0, token_id=-1),)), "token -1 is outside"),  # type: ignore[arg-type]
        (lambda result: dataclasses.replace(result, sampled=(Sampled(sequence=0, token_id=1000),)), "token 1000 is outside"),  # type: ignore[arg-type]
    ],
)
def test_an_answer_that_does_not_fit_the_plan_is_the_executors_death(
    spoil: Callable[[StepResult], StepResult], complaint: str
) -> None:
    facts = fake_facts()
    engine = make_engine(facts, executor=Liar(facts, spoil))
    engine.add(make_request())
    with pytest.raises(ExecutorDied, match=complaint):
        engine.step()
    assert len(engine.fail_all(EngineDown("down"))) == 1


def test_admission_leaves_the_running_sequences_room_to_grow() -> None:
    facts = fake_facts(num_blocks=200, block_tokens=4)
    engine = make_engine(facts, max_step_tokens=2000)
    engine.add(make_request("a", tuple(range(196 * 4)), 9))  # leaves four blocks, and grows into one of them
    engine.step()
    engine.step()
    engine.add(make_request("b", (1, 2, 3, 4, 5), 1))  # two blocks, where one must stay free besides the two kept back
    engine.step()
    assert engine.stats().num_waiting == 1
    engine.add(make_request("c", (1, 2, 3), 1, priority=1))  # one block: that is room enough
    assert [event.request_id for event in engine.step() if isinstance(event, SequenceFinished)] == ["c"]
    assert engine.stats().num_waiting == 1
    assert ids_of(run(engine), "b") == expected_tokens((1, 2, 3, 4, 5), 1)
    assert engine.stats().preemptions == 0


def calls_of_a_step(num_waiting: int) -> int:
    """Calls that one step makes, Python's and C's, with a full batch and this many requests behind it."""
    facts = fake_facts(num_blocks=100)
    engine = make_engine(facts, max_queued_requests=num_waiting + 8, max_queued_tokens=100_000)
    for number in range(8 + num_waiting):
        engine.add(make_request(f"r{number}", (number, 1, 2), 20, deadline_seconds=1000.0 + number, priority=number % 3))
        if number == 7:
            engine.step()
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # a collection that falls into the step calls what watches for it, and for what it finds
    sys.setprofile(count)
    try:
        engine.step()
    finally:
        sys.setprofile(before)
        gc.enable()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.steps) == (8, num_waiting, 2)
    return calls


def test_a_step_does_the_same_work_however_many_wait() -> None:
    assert calls_of_a_step(10) == calls_of_a_step(3000)


def test_ending_many_waiting_requests_leaves_no_trace_of_them() -> None:
    engine = make_engine(max_queued_requests=3000, max_queued_tokens=100_000, max_num_seqs=1)
    for number in range(3000):
        engine.add(make_request(f"r{number}", deadline_seconds=1000.0 - number / 10))
    engine.step()
    for number in range(1, 3000):
        assert engine.abort(RequestId(f"r{number * 7 % 3000}"), RequestAborted("aborted"))
    engine.check()  # among other things that struck entries do not outnumber live ones
    assert engine.request_ids == ("r0",)
    assert ids_of(run(engine), "r0") == expected_tokens((1, 2, 3), 4)[1:]
