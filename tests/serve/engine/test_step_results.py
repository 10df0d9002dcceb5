"""What a request is answered: its events, where they stop, what is counted of them."""

from __future__ import annotations

import pytest

from serve.engine.plan import StepPlan
from serve.types import FinishReason, Generation, PromptReady, ResponseOptions, SequenceFinished, StoppingParams, TokensOut
from tests.serve.engine.engines import Clock, ids_of, make_engine, make_request, run
from tests.serve.fake_executor import FakeExecutor, expected_tokens, fake_facts
from tests.serve.fake_text import LetterStream, letters


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
    # Two blocks of four each: for the second sequence of a, for b, which waited for a to make them, and for c.
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (36, 24)
    assert engine.flush_prefix_cache() > 0
    assert engine.stats().kv_blocks_cached == 0
