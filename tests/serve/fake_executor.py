"""An executor whose tokens can be computed by hand, and which believes nothing it is told.

Each position's cache entry is a digest of all tokens up to it. The executor keeps these entries by (block, slot), exactly
as ranks keep keys and values, reads every position of a sequence back through its block table before it samples, and fails
loudly on a plan that breaks the contract: a gap between spans, a block two sequences write to, a wrong prefix hit, a block
used after it was freed, a budget exceeded. The next token is a function of the digest, the seed and the sequence index.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from serve.engine.executor import ExecutorDied, ModelFacts
from serve.engine.plan import DRAFTED, PromptLogprobs, Sampled, SequenceFault, Span, Start, StepPlan, StepResult
from serve.types import BlockId, SequenceId, TokenLogprob

_PRIME = (1 << 61) - 1
_EMPTY = 17
"""Digest of no tokens."""


def fake_facts(
    *,
    vocab_size: int = 1000,
    max_model_len: int = 2048,
    eos_ids: tuple[int, ...] = (),
    num_blocks: int = 64,
    block_tokens: int = 4,
) -> ModelFacts:
    """Facts of a model that does not exist."""
    return ModelFacts(
        family="fake",
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_ids=eos_ids,
        dtype="float32",
        device="cpu",
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        num_parameters=1,
        checkpoint_step=None,
        load_seconds=(("import", 0.1), ("build", 0.1), ("weights", 0.1), ("cache", 0.1)),
    )


def _extend(digest: int, token_id: int) -> int:
    return (digest * 1_000_003 + token_id + 1) % _PRIME


def prefix_digest(token_ids: Iterable[int], weights: int = 0) -> int:
    """What the cache holds at the last of these positions, computed with the weights of this number."""
    digest = _EMPTY + weights
    for token_id in token_ids:
        digest = _extend(digest, token_id)
    return digest


def next_token(digest: int, *, seed: int = 0, index: int = 0, vocab_size: int = 1000, banned: Iterable[int] = ()) -> int:
    """The token after a prefix; the next one up if it is banned."""
    token_id = (digest ^ (seed * 7919 + index * 104_729)) * 2_654_435_761 % _PRIME % vocab_size
    while token_id in banned:
        token_id = (token_id + 1) % vocab_size
    return token_id


def fake_logprob(digest: int, token_id: int, top: int) -> TokenLogprob:
    """A logprob that depends on everything a true one depends on."""
    value = -((digest + token_id) % 1009 + 1) / 64
    return TokenLogprob(token_id, value, 1 + token_id % 7, tuple((token_id + i, value - i) for i in range(top)))


def expected_tokens(
    prompt_ids: Iterable[int],
    num_tokens: int,
    *,
    seed: int = 0,
    index: int = 0,
    vocab_size: int = 1000,
    end_ids: tuple[int, ...] = (),
    min_new_tokens: int = 0,
    weights: int = 0,
) -> list[int]:
    """What a sequence generates: at most ``num_tokens``, and nothing after the first of ``end_ids``."""
    digest = prefix_digest(prompt_ids, weights)
    tokens: list[int] = []
    while len(tokens) < num_tokens and not (tokens and tokens[-1] in end_ids):
        banned = end_ids if len(tokens) < min_new_tokens else ()
        tokens.append(next_token(digest, seed=seed, index=index, vocab_size=vocab_size, banned=banned))
        digest = _extend(digest, tokens[-1])
    return tokens


@dataclass
class _Known:
    """What plans have told of one sequence."""

    start: Start
    token_ids: list[int]
    blocks: list[BlockId] = field(default_factory=list)
    num_computed: int | None = None
    """``None`` before its first span."""
    drawn: int | None = None
    """What its last span sampled."""


class Deferred:
    """``launch`` and ``collect`` of an executor, made of its ``execute``: a step is computed when its result is asked for."""

    def launch(self, plan: StepPlan, *, overtakes: bool = False) -> None:
        """See ``serve.engine.executor.Executor``: what may overtake does."""
        launched: deque[StepPlan] = vars(self).setdefault("launched", deque())
        launched.insert(0 if overtakes else len(launched), plan)

    def wait(self, seconds: float, bell: int | None = None) -> bool:
        """See ``serve.engine.executor.Executor``: what is asked for is computed when it is collected."""
        return False

    def collect(self) -> StepResult:
        """See ``serve.engine.executor.Executor``."""
        return self.execute(vars(self)["launched"].popleft())

    def execute(self, plan: StepPlan) -> StepResult:
        """See ``serve.engine.executor.Executor``."""
        raise NotImplementedError


class Runs(Protocol):
    """A rank's runner."""

    def execute(self, plan: StepPlan) -> StepResult | None: ...


class OnlyRank(Deferred):
    """An executor of one rank, in this process."""

    def __init__(self, runner: Runs) -> None:
        self._runner = runner

    def execute(self, plan: StepPlan) -> StepResult:
        """See ``serve.engine.executor.Executor``."""
        result = self._runner.execute(plan)
        assert result is not None, "rank 0 answers"
        return result


class FakeExecutor(Deferred):
    """Computes plans by hand and checks each of them.

    Args:
        facts: the pool and vocabulary to play; ``fake_facts()`` by default.
        max_step_tokens, max_num_seqs: when given, limits that plans must respect.
        fault_token: a sequence that contains this id anywhere cannot be sampled.
        dies_at_step: the step with this number, and every one after it, raises ``ExecutorDied``.
        on_execute: called with each plan before it is computed; may block, to play a slow model.
    """

    def __init__(
        self,
        facts: ModelFacts | None = None,
        *,
        max_step_tokens: int | None = None,
        max_num_seqs: int | None = None,
        fault_token: int | None = None,
        dies_at_step: int | None = None,
        on_execute: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self.facts = facts or fake_facts()
        self.fault_token = fault_token
        self.dies_at_step = dies_at_step
        self.on_execute = on_execute
        self.given: list[StepPlan] = []
        """The plans that were launched."""
        self.num_overtaking = 0
        """How many of them were allowed to overtake the one before."""
        self.lets_pass = True
        """Whether they do; ranks that come to them too late compute them in order."""
        self._early: set[int] = set()
        """Steps that have overtaken the one that is due."""
        self.num_tokens = 0
        """Positions computed in all steps."""
        self._max_step_tokens = max_step_tokens
        self._max_num_seqs = max_num_seqs
        self._known: dict[SequenceId, _Known] = {}
        self._cache: dict[tuple[BlockId, int], int] = {}
        self._next_step = 0
        self._weights = 0
        self.refused_weights: dict[int, str] = {}
        """Numbers of weights that are refused when they are to be taken, and why."""

    @property
    def live_sequences(self) -> frozenset[SequenceId]:
        """The sequences that plans started and have not dropped."""
        return frozenset(self._known)

    def table(self, sequence: SequenceId) -> tuple[BlockId, ...]:
        """The block table that plans gave this live sequence."""
        return tuple(self._known[sequence].blocks)

    def launch(self, plan: StepPlan, *, overtakes: bool = False) -> None:
        """See ``serve.engine.executor.Executor``."""
        self.given.append(plan)
        self.num_overtaking += overtakes
        super().launch(plan, overtakes=overtakes and self.lets_pass)

    def execute(self, plan: StepPlan) -> StepResult:
        """See ``serve.engine.executor.Executor``."""
        if self.on_execute is not None:
            self.on_execute(plan)
        if self.dies_at_step is not None and plan.step >= self.dies_at_step:
            raise ExecutorDied("the fake ranks died")
        known = bool(self._early) and plan.step == self._next_step
        self._check_plan(plan)
        if not known:
            self._learn(plan)
        plan = dataclasses.replace(plan, spans=tuple(self._drafted(span) for span in plan.spans))
        if plan.swap is not None:
            return self._exchange(plan, plan.swap)
        self._check_tables()
        for span in plan.spans:
            self._write(span)
        results = [self._read(span) for span in plan.spans]
        self.num_tokens += plan.num_tokens
        return StepResult(
            step=plan.step,
            sampled=tuple(r for parts in results for r in parts if isinstance(r, Sampled)),
            prompt_logprobs=tuple(r for parts in results for r in parts if isinstance(r, PromptLogprobs)),
            faults=tuple(r for parts in results for r in parts if isinstance(r, SequenceFault)),
        )

    def _drafted(self, span: Span) -> Span:
        """The span as a draft model fills it, which is wrong after every fifth token."""
        if DRAFTED not in span.proposed:
            return span
        start, told = self._known[span.sequence].start, list(self._known[span.sequence].token_ids)
        for _ in span.proposed:
            digest, size = prefix_digest(told, self._weights), self.facts.vocab_size
            token = next_token(digest, seed=start.sampling.seed, index=start.index, vocab_size=size)
            told.append((token + (len(told) % 5 == 0)) % size)
        return msgspec.structs.replace(span, proposed=tuple(told[-len(span.proposed) :]))

    def _exchange(self, plan: StepPlan, number: int) -> StepResult:
        """Whatever the cache holds was computed with other weights: a sequence that went on with it would be seen to."""
        assert not self._known, "weights are exchanged under sequences that the ranks know"
        assert not plan.spans, "an exchange of weights computes nothing"
        refused = self.refused_weights.get(number, "")
        if not refused:
            self._weights = number
        self._cache.clear()
        return StepResult(step=plan.step, refused=refused)

    def _check_plan(self, plan: StepPlan) -> None:
        under: StepPlan | None = next(iter(vars(self).get("launched", ())), None)
        if plan.step != self._next_step and under is not None and under.step == self._next_step:
            assert plan.step == self._next_step + 1 + len(self._early), f"step {plan.step} overtook step {self._next_step}"
            overtaken = {span.sequence for span in under.spans}
            assert not overtaken & set(plan.dropped), f"step {plan.step} drops what it overtakes"
            if not self._early:
                self._learn(under)  # as ranks do that are in the middle of it
            self._early.add(plan.step)
        else:
            assert plan.step == self._next_step, f"step {plan.step} came, {self._next_step} was due"
            self._next_step += 1 + len(self._early)
            self._early.clear()
        assert plan.spans or plan.dropped or plan.swap is not None, f"step {plan.step} is empty"
        sequences = [span.sequence for span in plan.spans]
        assert len(set(sequences)) == len(sequences), f"step {plan.step} has two spans of one sequence"
        assert {start.sequence for start in plan.starts} <= set(sequences), f"step {plan.step} starts what it does not compute"
        if self._max_step_tokens is not None:
            assert plan.num_tokens <= self._max_step_tokens, f"step {plan.step} has {plan.num_tokens} tokens"
        if self._max_num_seqs is not None:
            assert len(sequences) <= self._max_num_seqs, f"step {plan.step} has {len(sequences)} sequences"

    def _learn(self, plan: StepPlan) -> None:
        for sequence in plan.dropped:
            assert sequence in self._known, f"sequence {sequence} is dropped and was not known"
            del self._known[sequence]
        for start in plan.starts:
            assert start.sequence not in self._known, f"sequence {start.sequence} is started twice"
            assert 1 <= start.num_prompt_tokens <= len(start.token_ids), f"sequence {start.sequence} starts without its prompt"
            self._known[start.sequence] = _Known(start, list(start.token_ids))
        for span in plan.spans:
            assert span.sequence in self._known, f"sequence {span.sequence} is computed and was not started"
            known = self._known[span.sequence]
            if span.continues:
                assert known.drawn is not None, f"sequence {span.sequence} continues and has sampled nothing"
                known.token_ids.append(known.drawn)
            known.drawn = None
            known.token_ids.extend(span.new_tokens)
            known.blocks.extend(span.new_blocks)

    def _check_tables(self) -> None:
        for known in self._known.values():
            assert len(set(known.blocks)) == len(known.blocks), f"sequence {known.start.sequence} has a block twice"
            assert all(0 <= block < self.facts.num_blocks for block in known.blocks), "a block outside the pool"

    def _write(self, span: Span) -> None:
        """Compute the span into the cache; nothing that another live sequence has in its table may be written to."""
        known, size = self._known[span.sequence], self.facts.block_tokens
        if known.num_computed is None:
            assert span.start % size == 0, f"sequence {span.sequence} starts at {span.start}, inside a block"
            if known.start.prompt_logprobs is not None:
                assert span.start == 0, f"sequence {span.sequence} wants prompt logprobs and skips {span.start} positions"
        else:
            assert span.start == known.num_computed, f"sequence {span.sequence}: gap before {span.start}"
        end = span.start + span.count
        assert span.count >= 1, f"sequence {span.sequence} has an empty span"
        told = [*known.token_ids, *span.proposed]
        assert end <= len(told), f"sequence {span.sequence}: {end} is past its last token"
        assert span.sample or not span.proposed, f"sequence {span.sequence} proposes tokens and does not sample"
        assert end <= len(known.blocks) * size, f"sequence {span.sequence}: blocks do not cover {end}"
        assert not span.sample or end == len(told), f"sequence {span.sequence} samples before its last token"
        written = {known.blocks[p // size] for p in range(span.start, end)}
        for sequence, other in self._known.items():
            shared = written.intersection(other.blocks) if sequence != span.sequence else set()
            assert not shared, f"sequence {span.sequence} writes to blocks {shared} of sequence {sequence}"
        digest = prefix_digest(known.token_ids[: span.start], self._weights)
        for position in range(span.start, end):
            digest = _extend(digest, told[position])
            self._cache[known.blocks[position // size], position % size] = digest
        known.num_computed = end  # of proposed tokens, those that come: see ``_read``

    def _read(self, span: Span) -> list[Sampled | PromptLogprobs | SequenceFault]:
        """Attend to all positions up to the span's end, and answer."""
        known, size = self._known[span.sequence], self.facts.block_tokens
        digest = _EMPTY + self._weights
        digests: list[int] = []
        told = [*known.token_ids, *span.proposed]
        for position in range(span.start + span.count):
            digest = _extend(digest, told[position])
            held = self._cache.get((known.blocks[position // size], position % size))
            assert held == digest, f"sequence {span.sequence}: position {position} holds something else"
            digests.append(digest)
        start = known.start
        parts: list[Sampled | PromptLogprobs | SequenceFault] = []
        if start.prompt_logprobs is not None:
            first, last = span.start + 1, min(span.start + span.count, start.num_prompt_tokens - 1)
            if first <= last and self.fault_token in known.token_ids[:last]:
                known.drawn = 0
                parts.append(SequenceFault(sequence=span.sequence, message="the logits are not finite", not_finite=True))
            elif first <= last:
                top = start.prompt_logprobs
                values = tuple(fake_logprob(digests[p - 1], known.token_ids[p], top) for p in range(first, last + 1))
                parts.append(PromptLogprobs(sequence=span.sequence, first=first, logprobs=values))
        if span.sample and not any(isinstance(part, SequenceFault) for part in parts):
            parts += self._sample_all(known, span, digests)
        return parts

    def _sample_all(self, known: _Known, span: Span, digests: list[int]) -> list[Sampled | SequenceFault]:
        """The token after the last known one, and those after proposed ones as far as these are what comes."""
        answers: list[Sampled | SequenceFault] = []
        num_known = known.num_computed = len(known.token_ids)
        for place, digest in enumerate(digests[num_known - 1 :]):
            answer = self._sample(known, digest, place)
            answers.append(answer)
            if isinstance(answer, SequenceFault) or answer.token_id not in span.proposed[place : place + 1]:
                break
            known.num_computed += 1
        return answers

    def _sample(self, known: _Known, digest: int, place: int) -> Sampled | SequenceFault:
        start = known.start
        if self.fault_token is not None and self.fault_token in known.token_ids:
            known.drawn = 0
            return SequenceFault(sequence=start.sequence, message="the logits are not finite", not_finite=True)
        num_generated = len(known.token_ids) + place - start.num_prompt_tokens
        banned = start.end_ids if num_generated < start.min_new_tokens else ()
        token_id = next_token(
            digest, seed=start.sampling.seed, index=start.index, vocab_size=self.facts.vocab_size, banned=banned
        )
        known.drawn = token_id
        logprob = fake_logprob(digest, token_id, start.logprobs) if start.logprobs is not None else None
        return Sampled(sequence=start.sequence, token_id=token_id, logprob=logprob)
