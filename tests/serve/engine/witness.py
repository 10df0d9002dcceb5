"""Follows the events of an engine and compares each request with what it must have said, computed without an engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from serve.engine.executor import ModelFacts
from serve.errors import RequestError
from serve.types import (
    Event,
    FinishReason,
    Generation,
    PromptReady,
    RequestFailed,
    RequestId,
    SequenceFinished,
    TokenLogprob,
    TokensOut,
)
from tests.serve.fake_executor import expected_tokens, fake_logprob, prefix_digest
from tests.serve.fake_text import letters


@dataclass(frozen=True)
class Outcome:
    """All that one sequence says when nothing ends it early."""

    told_ids: list[int]
    num_generated: int
    text: str
    reason: FinishReason
    matched: str | int | None


def outcome_of(generation: Generation, index: int, facts: ModelFacts) -> Outcome:
    """The stopping rules, applied to the whole sequence at once."""
    stopping = generation.stopping
    eos_ids = () if stopping.ignore_eos else facts.eos_ids
    end_ids = (*eos_ids, *stopping.stop_ids)
    tokens = expected_tokens(
        generation.prompt_ids,
        stopping.max_new_tokens,
        seed=generation.sampling.seed,
        index=index,
        vocab_size=facts.vocab_size,
        end_ids=end_ids,
        min_new_tokens=stopping.min_new_tokens,
    )
    first_searched = max(0, stopping.min_new_tokens - 1)
    for count in range(first_searched + 1, len(tokens) + 1):
        if tokens[count - 1] in end_ids:
            break
        before, searched = letters(tokens[:first_searched]), letters(tokens[first_searched:count])
        for stop in stopping.stop_strings:
            if stop in searched:
                end = searched.index(stop) + (len(stop) if stopping.include_stop else 0)
                text = before + searched[:end]
                return Outcome(tokens[:count], count, text, FinishReason.STOP_STRING, stop)
    if tokens and tokens[-1] in end_ids:
        told = tokens if stopping.include_stop else tokens[:-1]
        reason = FinishReason.EOS if tokens[-1] in eos_ids else FinishReason.STOP_ID
        return Outcome(told, len(tokens), letters(tokens[:-1]), reason, tokens[-1])
    return Outcome(tokens, len(tokens), letters(tokens), FinishReason.LENGTH, None)


@dataclass
class _Story:
    """What one request has said so far."""

    generation: Generation
    outcomes: list[Outcome]
    ids: list[list[int]]
    text: list[str]
    ready: bool = False
    finished: set[int] = field(default_factory=set)


class Witness:
    """Asserts that every request says what it must, in order, and ends exactly once."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self._alive: dict[RequestId, _Story] = {}
        self.failures: dict[RequestId, Exception] = {}
        self.num_finished = 0
        self.num_accepted = 0
        self.num_generated = 0
        """Tokens of sequences that finished."""

    @property
    def alive(self) -> tuple[RequestId, ...]:
        return tuple(self._alive)

    def accepted(self, generation: Generation) -> None:
        """The engine took this request."""
        count = generation.num_sequences
        outcomes = [outcome_of(generation, index, self._facts) for index in range(count)]
        self._alive[generation.request_id] = _Story(generation, outcomes, [[] for _ in range(count)], [""] * count)

    def saw(self, events: Iterable[Event]) -> None:
        """Compare events with what must come."""
        for event in events:
            story = self._alive.get(event.request_id)
            assert story is not None, f"{event} belongs to no live request"
            if isinstance(event, RequestFailed):
                assert isinstance(event.error, RequestError)
                self.failures[event.request_id] = event.error
                del self._alive[event.request_id]
            elif isinstance(event, PromptReady):
                self._saw_prompt(story, event)
            else:
                assert story.ready, f"{event} came before the prompt was ready"
                assert event.index not in story.finished, f"{event} came after its sequence had finished"
                if isinstance(event, TokensOut):
                    self._saw_tokens(story, event)
                else:
                    self._saw_end(story, event)

    def _saw_prompt(self, story: _Story, event: PromptReady) -> None:
        generation = story.generation
        assert not story.ready, "the prompt became ready twice"
        story.ready = True
        assert event.prompt_tokens == len(generation.prompt_ids)
        assert 0 <= event.cached_tokens < event.prompt_tokens
        top = generation.response.prompt_logprobs
        expected: tuple[TokenLogprob | None, ...] = ()
        if top is not None:
            assert event.cached_tokens == 0
            prompt = generation.prompt_ids
            expected = (None, *(fake_logprob(prefix_digest(prompt[:p]), prompt[p], top) for p in range(1, len(prompt))))
        assert event.logprobs == expected

    def _saw_tokens(self, story: _Story, event: TokensOut) -> None:
        generation, index, ids = story.generation, event.index, story.ids[event.index]
        assert event.token_ids or event.text, "an event says nothing"
        assert len(event.token_ids) <= 1
        for token_id, logprob in zip(event.token_ids, event.logprobs, strict=generation.response.logprobs is not None):
            digest = prefix_digest((*generation.prompt_ids, *ids))
            assert generation.response.logprobs is not None
            assert logprob == fake_logprob(digest, token_id, generation.response.logprobs)
        ids.extend(event.token_ids)
        story.text[index] += event.text
        assert ids == story.outcomes[index].told_ids[: len(ids)], "the tokens are others than expected"
        expected_text = story.outcomes[index].text if generation.response.text else ""
        assert expected_text.startswith(story.text[index]), "the text is another than expected"

    def _saw_end(self, story: _Story, event: SequenceFinished) -> None:
        generation, outcome = story.generation, story.outcomes[event.index]
        assert (event.reason, event.matched_stop) == (outcome.reason, outcome.matched)
        assert story.ids[event.index] == outcome.told_ids
        assert story.text[event.index] == (outcome.text if generation.response.text else "")
        assert event.usage.prompt_tokens == len(generation.prompt_ids)
        assert event.usage.completion_tokens == outcome.num_generated
        assert event.seed == generation.sampling.seed
        assert 0 <= event.timings.queue_seconds <= event.timings.first_token_seconds <= event.timings.total_seconds
        story.finished.add(event.index)
        self.num_generated += outcome.num_generated
        self.num_accepted += event.accepted_tokens
        assert event.accepted_tokens <= min(event.proposed_tokens, outcome.num_generated)
        assert event.request_done == (len(story.finished) == generation.num_sequences)
        if event.request_done:
            self.num_finished += 1
            del self._alive[event.request_id]
