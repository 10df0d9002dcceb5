"""Values that every layer of the server shares. Frozen, slotted, printable; no behaviour beyond reading them.

Those of which each step makes hundreds are structures of msgspec's: a frozen dataclass takes ten times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType

import msgspec

RequestId = NewType("RequestId", str)
"""The client's name for a request, or one the server made; unique among the requests that are alive."""

SequenceId = NewType("SequenceId", int)
"""A sequence's number in the engine and on the ranks; never used twice in an engine's life."""

BlockId = NewType("BlockId", int)
"""Index of one KV block in every layer's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRule:
    """How a token's key depends on the length of its own sequence, in models whose rotary angles change beyond a length.

    Each token is computed by a length: the prompt's for tokens of the prompt, one more than its position for those after it.
    That is what a sequence that is computed alone, token after token, has seen of itself by then; it is the same whatever
    runs beside it, in how many steps the prompt is computed and how often it is computed again.
    """

    plain_tokens: int
    """Up to this length a key depends on the tokens up to it alone."""
    each_length: bool
    """Whether beyond it every length makes keys of its own; otherwise all of them make the same."""
    recomputes: bool
    """Whether a sequence that grows beyond it is computed again from its first token on, as if it had come so long."""

    def first_length(self, num_prompt_tokens: int, num_known: int) -> int:
        """The least length by which a sequence's tokens are computed, where ``num_known`` of them were known at its start."""
        return num_known if self.recomputes else num_prompt_tokens

    def kind(self, first_length: int) -> int:
        """What sequences must have in common, beside their tokens, to have the same keys; 0 for those that begin plainly."""
        if first_length <= self.plain_tokens:
            return 0
        return first_length if self.each_length else self.plain_tokens + 1

    def starts_again(self, num_known: int) -> bool:
        """Whether a sequence that has so many tokens, the last of them just generated, is computed from its first on again."""
        return self.recomputes and num_known == self.plain_tokens + 1


class FinishReason(Enum):
    """Why a sequence ended by itself. Cancelled, expired and failed requests end with an error instead."""

    LENGTH = "length"
    EOS = "eos"
    STOP_STRING = "stop_string"
    STOP_ID = "stop_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen from the logits. Order of application: allowed and banned ids, logit bias,
    penalties, temperature, min-p, top-k, top-p, typical-p."""

    temperature: float = 0.0
    """Divides the logits; 0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches this; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest one; 0 keeps all."""
    typical_p: float = 1.0
    """Locally typical sampling (Meister et al. 2022): mass kept, nearest to the entropy first; 1 keeps all."""
    seed: int = 0
    """Unsigned 64 bits. Token t of sequence i depends on (seed, i, t) and the logits alone."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it is in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (token id, value added to its logit)."""
    allowed_ids: tuple[int, ...] = ()
    """Only these tokens may be sampled; empty allows all."""
    banned_ids: tuple[int, ...] = ()
    """These tokens are never sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingParams:
    """When a sequence ends."""

    max_new_tokens: int
    """Tokens to generate at most; the prompt is not counted. 0 is allowed with echo or prompt logprobs."""
    min_new_tokens: int = 0
    """Before this many tokens neither EOS nor a stop id can be sampled, and stop strings are not looked for."""
    stop_strings: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    include_stop: bool = False
    """Whether the text keeps the matched stop string, and the token ids the matched stop id."""
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """What the client wants to hear of."""

    text: bool = True
    token_ids: bool = True
    logprobs: int | None = None
    """``None``: no logprobs. k ≥ 0: the sampled token's, and the k likeliest tokens'."""
    prompt_logprobs: int | None = None
    """The prompt's tokens after the first: ``None`` for none; k ≥ 0 for each one's own logprob, and the k likeliest tokens'."""
    echo: bool = False
    """Whether the prompt's text and ids come back before the first generated token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One accepted request, checked against the model's limits."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    """At least one id, each in [0, vocabulary)."""
    prompt_text: str = ""
    """What echo returns as text; the decoded ids if the client sent ids."""
    sampling: SamplingParams
    stopping: StoppingParams
    response: ResponseOptions = ResponseOptions()
    num_sequences: int = 1
    priority: int = 0
    """Larger goes first among the waiting; arrival decides between equals."""
    pin_weights: bool = False
    """Whether all its tokens must be made by the same weights: an exchange waits for it then, once it has begun."""
    speculative_tokens: int | None = None
    """Tokens proposed at most for one step of a sequence; ``None``, and more than the server's own limit, mean that limit."""
    cache_salt: str = ""
    """Only requests with the same salt share prefix-cache blocks."""
    tenant: str = ""
    """Who asks. Empty where callers are not told apart."""
    shares_cache: bool = False
    """Whether prefix-cache blocks are shared with all tenants of whom this is true; otherwise with the same tenant alone."""
    arrival_seconds: float = 0.0
    """Monotonic clock."""
    deadline_seconds: float | None = None
    """Monotonic clock; ``None`` waits for ever."""


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """Natural-log probability of one token under the model's unmodified distribution (before penalties and temperature)."""

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token of the vocabulary; 0 when the rank was not computed (entries of ``top``: their order)."""
    top: tuple[tuple[int, float], ...] = ()
    """The k likeliest (token id, logprob), best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one sequence."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache when the sequence was first scheduled."""
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds since the request's arrival."""

    queue_seconds: float
    """Until the first step that computed anything for it."""
    first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class MadeBy:
    """Which weights made the tokens of a sequence from one on."""

    first_token: int
    """The first of them, counted from 0 at the first generated one."""
    checkpoint_step: int | None
    """The training step of those weights, where it is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReady:
    """First event of a request: its prompt is computed (or its first token was sampled)."""

    request_id: RequestId
    prompt_tokens: int
    cached_tokens: int
    queue_seconds: float | None = None
    """From arrival to the first step that computed anything for it."""
    logprobs: tuple[TokenLogprob | None, ...] = ()
    """One per prompt token, the first ``None``; empty unless ``prompt_logprobs`` was asked for."""


class TokensOut(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New output of one sequence. Text may lag behind the ids: incomplete characters and possible stop strings are held."""

    request_id: RequestId
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFinished:
    """Last event of one sequence; the request ends when each of its ``num_sequences`` has had one."""

    request_id: RequestId
    index: int
    reason: FinishReason
    matched_stop: str | int | None
    """The stop string, or the stop or EOS id, that ended it; ``None`` for LENGTH."""
    usage: Usage
    timings: Timings
    seed: int
    request_done: bool
    """True on the event that ends the whole request."""
    made_by: tuple[MadeBy, ...] = ()
    """The weights that made its tokens, in order; more than one where they were exchanged meanwhile."""
    proposed_tokens: int = 0
    """Tokens that were guessed ahead and verified by the model."""
    accepted_tokens: int = 0
    """Guessed tokens that became output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """The only other way a request ends: nothing of it follows this event."""

    request_id: RequestId
    error: Exception
    """A ``serve.errors.ServeError``."""
    queue_seconds: float | None = None
    """From arrival to the first step that computed anything for it; ``None`` if there was none."""
    computed_tokens: int = 0
    """Positions that were computed for its sequences that had not ended."""


Event = PromptReady | TokensOut | SequenceFinished | RequestFailed
