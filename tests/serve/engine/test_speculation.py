"""What a sequence proposes, and how much."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from serve.engine.executor import ExecutorDied
from serve.engine.lookup import Lookup
from serve.engine.plan import Sampled, StepPlan, StepResult
from serve.engine.speculation import Speculation
from serve.types import SequenceFinished, SequenceId
from tests.serve.engine.engines import ids_of, make_engine, make_request, run
from tests.serve.fake_executor import FakeExecutor, fake_facts

FEW = fake_facts(vocab_size=2, num_blocks=256)
"""So few tokens that texts repeat themselves by chance."""


def _plainly(text: list[int], count: int, least: int) -> tuple[int, ...]:
    """The same search, place by place."""
    for length in range(4, least - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                found = text[end:]
                while len(found) < count:
                    found.append(found[end - len(text)])
                return tuple(found[:count])
    return ()


def test_the_longest_equal_run_of_tokens_is_found_and_of_these_the_latest() -> None:
    lookup = Lookup()
    assert lookup.find([9], 3) == ()
    text = [1, 2, 3, 4, 50, 51, 52, 9, 2, 3, 4, 60, 61, 62, 7, 3, 4, 70, 71, 72, 1, 2, 3, 4]
    assert lookup.find(text, 3) == (50, 51, 52)
    assert lookup.find([*text, 99], 3) == ()
    assert lookup.find([*text, 99, 0, 3, 4], 2) == (99, 0)


def test_a_text_that_goes_in_a_circle_is_expected_to_stay_there() -> None:
    assert Lookup().find([5, 1, 2, 1, 2], 5) == (1, 2, 1, 2, 1)
    assert Lookup().find([7, 7, 7], 4) == (7, 7, 7, 7)


def test_what_is_found_in_a_growing_text_is_what_a_plain_search_finds() -> None:
    draw = random.Random(0)
    for _ in range(20):
        lookup, text = Lookup(), [draw.randrange(4) for _ in range(draw.randint(1, 30))]
        while len(text) < 60:  # so few pairs that none has more earlier places than are looked at
            for least in (2, 3):
                assert lookup.find(text, 5, least) == _plainly(text, 5, least)
            text += [draw.randrange(4) for _ in range(draw.randint(1, 3))]


def test_as_much_is_proposed_as_was_accepted_lately() -> None:
    speculation, text = Speculation(8), [1, 2] * 20
    assert len(speculation.propose(text, 100)) == 2
    for accepted, then in ((2, 4), (4, 8), (8, 8), (4, 8), (3, 4), (1, 2), (1, 2), (2, 4)):
        speculation.adapt(len(speculation.propose(text, 100)), accepted, len(text))
        assert len(speculation.propose(text, 100)) == then
    assert len(speculation.propose(text, 3)) == 3
    assert speculation.propose(text, 0) == ()


def test_a_sequence_that_guesses_wrong_again_and_again_is_left_alone_longer_and_longer() -> None:
    speculation, text, tried = Speculation(8), [1, 2] * 20, []
    for _ in range(200):
        if proposed := speculation.propose(text, 100):
            tried.append(len(text))
            speculation.adapt(len(proposed), 0, len(text))
        text.append(1 + len(text) % 2)
    assert [b - a for a, b in itertools.pairwise(tried)] == [1, 2, 4, 8, 16, 32, 32, 32, 32, 32]
    speculation.adapt(1, 1, len(text))
    speculation.adapt(1, 0, len(text))
    assert speculation.propose(text, 100) == ()
    assert speculation.propose([*text, 1], 100) != ()


def test_a_sequence_that_was_guessed_wrong_and_says_nothing_twice_is_left_alone_too() -> None:
    speculation, text = Speculation(8), [1, 2, 1, 2]
    speculation.adapt(len(speculation.propose(text, 100)), 0, len(text))
    looked = []
    for token in range(10, 60):
        text.append(token)
        if not speculation.rests(len(text)):
            looked.append(len(text))
            assert speculation.propose(text, 100) == ()
    assert [b - a for a, b in itertools.pairwise(looked)][:4] == [2, 4, 4, 4]


def test_who_was_guessed_wrong_three_times_in_a_row_must_say_three_tokens_again() -> None:
    pair, three = [5, 6, 7, 8, 9, 6, 7], [5, 6, 7, 8, 5, 6, 7]
    for wrong, proposes in ((2, True), (3, False)):
        speculation = Speculation(8)
        for _ in range(wrong):
            speculation.adapt(1, 0, 0)
        text = [*range(100, 150), *pair]
        assert (speculation.propose(text, 1) == (8,)) is proposes
    speculation = Speculation(8)
    for _ in range(9):
        speculation.adapt(1, 0, 0)
    assert speculation.propose([*range(100, 150), *three], 1) == (8,)


def test_a_request_can_have_fewer_proposed_or_none() -> None:
    for asked, most in ((None, 6), (9, 6), (2, 2), (0, 0)):
        plans: list[StepPlan] = []
        executor = FakeExecutor(FEW, on_execute=plans.append)
        engine = make_engine(FEW, executor=executor, speculative_tokens=6)
        engine.add(make_request(prompt=(1, 0) * 8, max_new=200, speculative_tokens=asked))
        finished = run(engine)[-1]
        assert max(len(span.proposed) for plan in plans for span in plan.spans) == most
        assert isinstance(finished, SequenceFinished)
        assert finished.proposed_tokens == sum(len(span.proposed) for plan in plans for span in plan.spans)
        assert (finished.accepted_tokens > 0) == (most > 0)
        assert finished.usage.completion_tokens == 200


@pytest.mark.parametrize("drafts", [False, True])
def test_steps_are_saved_and_tokens_are_the_same(drafts: bool) -> None:
    said, steps = [], []
    for most in (0, 4):
        engine = make_engine(FEW, speculative_tokens=most, drafts=drafts)
        engine.add(make_request(prompt=(1, 0) * 8, max_new=300))
        said.append(ids_of(run(engine)))
        steps.append(engine.stats().steps)
    assert said[0] == said[1]
    stats = engine.stats()
    assert steps[1] == steps[0] - stats.accepted_tokens
    assert stats.accepted_tokens > 20


def test_more_answers_than_a_draft_model_was_asked_for_are_the_executors_death() -> None:
    class Liar(FakeExecutor):
        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            asked = sum(len(span.proposed) for span in plan.spans)
            return dataclasses.replace(result, sampled=result.sampled[:1] * (asked + 2)) if asked else result

    engine = make_engine(FEW, executor=Liar(FEW), speculative_tokens=2, drafts=True)
    engine.add(make_request(prompt=(1, 0, 1), max_new=20))
    engine.step()
    with pytest.raises(ExecutorDied, match=r"one more came for sequence 0, of which \(-1, -1\) was proposed"):
        engine.step()


@pytest.mark.parametrize("tokens", [(1, 1, 1), (0, 1), (1, 0, 1, 0)])
def test_answers_that_go_on_after_another_token_than_the_proposed_are_the_executors_death(tokens: tuple[int, ...]) -> None:
    class Liar(FakeExecutor):
        def execute(self, plan: StepPlan) -> StepResult:
            super().execute(plan)
            answers = tokens if plan.step else (0,)
            return StepResult(step=plan.step, sampled=tuple(Sampled(sequence=SequenceId(0), token_id=one) for one in answers))

    engine = make_engine(FEW, executor=Liar(FEW), speculative_tokens=2)
    engine.add(make_request(prompt=(1, 0, 1), max_new=20))
    engine.step()
    with pytest.raises(ExecutorDied, match=r"one more came for sequence 0, of which \(1, 0\) was proposed"):
        engine.step()
