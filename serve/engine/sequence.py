"""The engine's mutable state: one sequence, and the request it belongs to."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from serve.engine.prefix_cache import DigestChain
from serve.engine.speculation import Speculation
from serve.engine.stats import Loss
from serve.engine.stopping import StopRule
from serve.engine.swap import Weights
from serve.engine.text import TextStream
from serve.types import BlockId, Generation, SequenceId, TokenLogprob


class SequenceState(Enum):
    """Where a sequence is in its life."""

    HELD = "held"
    """It waits until the request's first sequence has computed the prompt they share."""
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False, kw_only=True)
class LiveRequest:
    """A request that has not ended."""

    generation: Generation
    num_prompt_tokens: int
    arrival: int
    """Serial number in order of arrival."""
    rule: StopRule
    turn: int | None = None
    """Its place among tenants of its priority, once it waits."""
    sequences: list[Sequence] = field(default_factory=list)
    """The live ones, by index."""
    num_running: int = 0
    """Sequences in the running batch."""
    started_seconds: float | None = None
    """Start of the first step that computed anything for it; ``None`` while it is queued."""
    num_deaths: int = 0
    """Deaths of the ranks while it ran, since it last got a token."""
    prompt_ready: bool = False
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """One per prompt token, filled as its chunks are computed; empty unless they were asked for."""

    @property
    def has_output(self) -> bool:
        """Whether a token was generated for one of its sequences, also one that has ended."""
        return len(self.sequences) < self.generation.num_sequences or any(
            len(seq.token_ids) > self.num_prompt_tokens for seq in self.sequences
        )

    @property
    def is_pinned(self) -> bool:
        """Whether all its tokens must be made by the same weights."""
        return self.generation.pin_weights


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One sequence: what is known of it, what is computed, what the ranks were told.

    It owes ``debt`` positions; that is all the scheduler needs to know, prompt or not.

    Always true: ``num_computed <= num_known_ahead``; the table covers ``num_computed`` positions; a sequence that is not
    running holds no block and is unknown to the ranks.
    """

    id: SequenceId
    index: int
    request: LiveRequest
    token_ids: list[int]
    """Prompt and output; only ever appended to."""
    text: TextStream | None
    """``None`` when neither text nor stop strings are wanted."""
    tells_text: bool
    """False when text is made for the stop strings alone."""
    chain: DigestChain | None
    """``None`` when nobody could share its blocks."""
    samples: bool
    """False when nothing is to be generated: it ends as soon as its prompt is computed."""
    speculation: Speculation | None = None
    """``None`` when no tokens are proposed for it."""
    state: SequenceState = SequenceState.HELD
    num_computed: int = 0
    """Positions whose keys and values are in the cache, or come there by a step that the ranks were given."""
    num_lost: int = 0
    """Positions that were computed when it had to begin again, until it has."""
    lost_by: Loss = "restarted"
    """Why it had to."""
    gives_way_from: int = 0
    """With so many positions computed it may give way to another tenant, again if it did before."""
    table: list[BlockId] = field(default_factory=list)
    num_pending: int = 0
    """Tokens after ``token_ids`` that steps under way sample."""
    restart_after: int | None = None
    """With so many positions computed it must be computed again from the first on (``LengthRule``); ``None`` for never."""
    num_registered: int = 0
    """Blocks of the table that the prefix cache knows."""
    num_known: int = 0
    """Tokens the ranks know; 0 when they do not know the sequence."""
    num_sent_blocks: int = 0
    """Blocks of the table the ranks know."""
    admitted: int = -1
    """Serial number of its latest admission; -1 before the first."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when it was first scheduled."""
    first_token_seconds: float | None = None
    made_by: list[tuple[int, Weights]] = field(default_factory=list)
    """The weights that made its tokens, each with the first of them, counted from 0."""

    @property
    def tenant(self) -> str:
        return self.request.generation.tenant

    @property
    def priority(self) -> int:
        return self.request.generation.priority

    @property
    def debt(self) -> int:
        """Positions that can be computed and are not: none after the last token that may be sampled without looking at it."""
        if not self.num_pending:
            return len(self.token_ids) - self.num_computed
        most = self.request.num_prompt_tokens + self.request.rule.max_new_tokens - 1
        if self.restart_after is not None:
            most = min(most, self.restart_after)
        return min(len(self.token_ids) + self.num_pending, most) - self.num_computed

    @property
    def num_known_ahead(self) -> int:
        """Its tokens once all that is under way has ended, if none of those is an end."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_spent(self) -> int:
        """Positions that were computed for it and are not known to be computed twice."""
        # Fewer than it found at first may be computed once it has begun again: the cache has lost them meanwhile.
        return max(0, max(self.num_computed, self.num_lost) - self.cached_tokens)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether it still has to compute the prompt's logprobs: then no position of the prompt may be skipped."""
        return self.index == 0 and bool(self.request.prompt_logprobs) and not self.request.prompt_ready

    def append(self, token_id: int, weights: Weights, now: float) -> int:
        """A token was sampled by these weights; returns how many were generated by now."""
        self.token_ids.append(token_id)
        num_generated = len(self.token_ids) - self.request.num_prompt_tokens
        if num_generated == 1:
            self.first_token_seconds = now
        if not self.made_by or self.made_by[-1][1] is not weights:
            self.made_by.append((num_generated - 1, weights))
        return num_generated

    def keep_prompt_logprobs(self, first: int, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Keep the logprobs of the prompt's tokens from ``first`` on, which were computed."""
        if self.wants_prompt_logprobs:
            self.request.prompt_logprobs[first : first + len(logprobs)] = logprobs

    def check_running(self, *, is_youngest: bool, num_under_way: int, block_tokens: int) -> None:
        """Assert what must hold between two steps of one that runs, with so many steps under way."""
        assert self.state is SequenceState.RUNNING, f"sequence {self.id} runs but is {self.state.value}"
        may_owe = self.debt == 1 or (is_youngest and self.debt > 1) or (num_under_way and self.debt == 0)
        assert may_owe, f"sequence {self.id} runs and owes {self.debt}"
        assert self.num_pending <= num_under_way, f"sequence {self.id} waits for {self.num_pending} tokens"
        assert len(self.table) * block_tokens >= self.num_computed, f"sequence {self.id} lacks blocks"
        assert len(set(self.table)) == len(self.table), f"sequence {self.id} has a block twice"

    def forget_computed(self) -> None:
        """Back to a sequence of which nothing is computed. The caller has released its blocks and told the ranks."""
        self.table = []
        self.num_computed = self.num_pending = self.num_registered = self.num_known = self.num_sent_blocks = 0
