"""What the engine promises its caller, one behaviour at a time."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import pytest

from serve.engine.engine import Engine, EngineLimits
from serve.engine.executor import Executor, ExecutorDied, ModelFacts
from serve.engine.plan import Sampled, StepPlan, StepResult
from serve.engine.text import TextDelta, TextFactory
from serve.errors import (
    DeadlineExpired,
    DuplicateRequest,
    EngineDown,
    InvalidRequest,
    QueueFull,
    RequestAborted,
    RequestBroke,
)
from serve.types import (
    Event,
    FinishReason,
    Generation,
    PromptReady,
    RequestFailed,
    RequestId,
    ResponseOptions,
    SamplingParams,
    SequenceFinished,
    StoppingParams,
    TokensOut,
)
from tests.serve.fake_executor import FakeExecutor, expected_tokens, fake_facts
from tests.serve.fake_text import LetterStream, letters, open_letters

LIMITS = EngineLimits(
    max_num_seqs=8, max_step_tokens=64, max_queued_requests=100, max_queued_tokens=10_000, prefix_caching=True
)


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_engine(
    facts: ModelFacts | None = None,
    *,
    executor: Executor | None = None,
    clock: Callable[[], float] | None = None,
    open_text: TextFactory = open_letters,
    **limits: int,
) -> Engine:
    facts = facts or fake_facts()
    return Engine(
        facts=facts,
        limits=dataclasses.replace(LIMITS, **limits),
        executor=executor or FakeExecutor(facts),
        open_text=open_text,
        clock=clock or Clock(),
    )


def make_request(name: str = "a", prompt: tuple[int, ...] = (1, 2, 3), max_new: int = 4, **more: object) -> Generation:
    stopping = StoppingParams(max_new_tokens=max_new)
    generation = Generation(request_id=RequestId(name), prompt_ids=prompt, sampling=SamplingParams(), stopping=stopping)
    return dataclasses.replace(generation, **more)  # type: ignore[arg-type]


def run(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
        engine.check()
    return events


def ids_of(events: list[Event], name: str = "a", index: int = 0) -> list[int]:
    outs = [e for e in events if isinstance(e, TokensOut) and (e.request_id, e.index) == (name, index)]
    return [token_id for out in outs for token_id in out.token_ids]


def test_a_request_says_ready_then_its_tokens_then_that_it_finished() -> None:
    engine = make_engine()
    engine.add(make_request())
    events = run(engine)
    kinds = [type(event) for event in events]
    assert kinds == [PromptReady, TokensOut, TokensOut, TokensOut, TokensOut, SequenceFinished]
    assert ids_of(events) == expected_tokens((1, 2, 3), 4)
    last = events[-1]
    assert isinstance(last, SequenceFinished)
    assert (last.reason, last.usage.completion_tokens, last.request_done) == (FinishReason.LENGTH, 4, True)
    assert not engine.has_work
    assert engine.step() == ()


def test_each_of_the_sequences_goes_its_own_way_and_only_the_last_end_is_the_requests() -> None:
    engine = make_engine()
    engine.add(make_request(num_sequences=3))
    events = run(engine)
    for index in range(3):
        assert ids_of(events, index=index) == expected_tokens((1, 2, 3), 4, index=index)
    ends = [event.request_done for event in events if isinstance(event, SequenceFinished)]
    assert ends == [False, False, True]
    assert sum(isinstance(event, PromptReady) for event in events) == 1


def test_a_request_without_new_tokens_ends_with_its_prompt_and_nothing_is_sampled() -> None:
    plans: list[StepPlan] = []
    facts = fake_facts()
    engine = make_engine(facts, executor=FakeExecutor(facts, on_execute=plans.append), max_step_tokens=2)
    engine.add(make_request(max_new=0, response=ResponseOptions(prompt_logprobs=1)))
    ready, finished = run(engine)
    assert isinstance(ready, PromptReady)
    assert [logprob and logprob.token_id for logprob in ready.logprobs] == [None, 2, 3]
    assert isinstance(finished, SequenceFinished)
    assert (finished.reason, finished.usage.completion_tokens) == (FinishReason.LENGTH, 0)
    assert finished.timings.first_token_seconds == finished.timings.total_seconds
    assert not any(span.sample for plan in plans for span in plan.spans)


def test_prompt_logprobs_are_whole_after_a_preemption_in_the_middle_of_the_prompt() -> None:
    facts = fake_facts(num_blocks=5, block_tokens=4)
    alone, crowded = make_engine(facts, max_step_tokens=3), make_engine(facts, max_step_tokens=3)
    scored = make_request("b", tuple(range(50, 62)), 1, response=ResponseOptions(prompt_logprobs=2))
    alone.add(scored)
    crowded.add(make_request("a", (1, 2, 3, 4), 16))
    crowded.step()
    crowded.step()
    crowded.add(scored)
    expected = [event for event in run(alone) if isinstance(event, PromptReady)]
    events = run(crowded)
    assert crowded.stats().preemptions > 0
    assert [event for event in events if isinstance(event, PromptReady) and event.request_id == "b"] == expected


@pytest.mark.parametrize("include_stop", [False, True])
def test_an_eos_is_counted_and_told_only_with_include_stop(include_stop: bool) -> None:
    tokens = expected_tokens((1, 2, 3), 5)
    engine = make_engine(fake_facts(eos_ids=(tokens[2],)))
    engine.add(make_request(stopping=StoppingParams(max_new_tokens=5, include_stop=include_stop)))
    events = run(engine)
    finished = events[-1]
    assert isinstance(finished, SequenceFinished)
    assert (finished.reason, finished.matched_stop) == (FinishReason.EOS, tokens[2])
    assert finished.usage.completion_tokens == 3
    assert ids_of(events) == (tokens[:3] if include_stop else tokens[:2])
    assert "".join(event.text for event in events if isinstance(event, TokensOut)) == letters(tokens[:2])


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_across_tokens_cuts_the_text_and_not_the_ids(include_stop: bool) -> None:
    tokens = expected_tokens((1, 2, 3), 6)
    stop = letters(tokens[2:4])
    engine = make_engine()
    stopping = StoppingParams(max_new_tokens=6, stop_strings=(stop,), include_stop=include_stop)
    engine.add(make_request(stopping=stopping))
    events = run(engine)
    finished = events[-1]
    assert isinstance(finished, SequenceFinished)
    assert (finished.reason, finished.matched_stop) == (FinishReason.STOP_STRING, stop)
    assert finished.usage.completion_tokens == 4
    assert ids_of(events) == tokens[:4]
    text = "".join(event.text for event in events if isinstance(event, TokensOut))
    assert text == letters(tokens[:2]) + (stop if include_stop else "")


def test_a_stop_string_on_the_last_token_is_a_stop_and_not_the_length() -> None:
    tokens = expected_tokens((1, 2, 3), 3)
    engine = make_engine()
    engine.add(make_request(stopping=StoppingParams(max_new_tokens=3, stop_strings=(letters(tokens[1:]),))))
    finished = run(engine)[-1]
    assert isinstance(finished, SequenceFinished)
    assert finished.reason is FinishReason.STOP_STRING


def test_text_that_nobody_wants_is_not_made() -> None:
    def refuse(generation: Generation, index: int) -> LetterStream:
        raise AssertionError("a text stream was opened")

    engine = make_engine(open_text=refuse)
    engine.add(make_request(response=ResponseOptions(text=False)))
    assert ids_of(run(engine)) == expected_tokens((1, 2, 3), 4)


def test_times_are_counted_from_the_arrival() -> None:
    clock = Clock()
    facts = fake_facts()

    def second_per_step(plan: StepPlan) -> None:
        clock.now += 1

    engine = make_engine(facts, executor=FakeExecutor(facts, on_execute=second_per_step), clock=clock, max_step_tokens=2)
    engine.add(make_request(arrival_seconds=90.0, max_new=3))
    finished = run(engine)[-1]
    assert isinstance(finished, SequenceFinished)
    timings = finished.timings
    # Two steps for the prompt of three; the second gives the first token.
    assert (timings.queue_seconds, timings.first_token_seconds, timings.total_seconds) == (10.0, 12.0, 14.0)
    last = engine.stats().last_step
    assert last is not None
    assert (last.tokens, last.num_spans, last.seconds) == (1, 1, 1.0)


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
    assert engine.drain_events() == (RequestFailed(request_id="a", error=error), RequestFailed(request_id="b", error=error))
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


def test_when_the_executor_dies_every_request_fails_once() -> None:
    facts = fake_facts()
    engine = make_engine(facts, executor=FakeExecutor(facts, dies_at_step=1))
    engine.add(make_request("a", num_sequences=2))
    engine.add(make_request("b"))
    assert engine.step()
    with pytest.raises(ExecutorDied):
        engine.step()
    error = EngineDown("the ranks are being restarted")
    assert engine.fail_all(error) == (RequestFailed(request_id="a", error=error), RequestFailed(request_id="b", error=error))
    assert engine.stats().kv_blocks_used == 0
    assert engine.request_ids == ()
    engine.check()


class Liar:
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
        (lambda result: dataclasses.replace(result, sampled=result.sampled * 2), "were due"),
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


def test_totals_count_what_clients_saw() -> None:
    engine = make_engine()
    engine.add(make_request("a", tuple(range(9)), 4, num_sequences=2))
    engine.add(make_request("b", tuple(range(9)), 2))
    run(engine)
    engine.add(make_request("c", tuple(range(9)), 2))
    run(engine)
    stats = engine.stats()
    assert stats.prompt_tokens == 27
    assert stats.generation_tokens == 4 * 2 + 2 + 2
    # Two blocks of four for the second sequence of a and for c; a and b began together and found nothing.
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (36, 16)
    assert engine.flush_prefix_cache() > 0
    assert engine.stats().kv_blocks_cached == 0


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
    sys.setprofile(count)
    try:
        engine.step()
    finally:
        sys.setprofile(before)
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
