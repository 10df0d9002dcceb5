"""What crosses the seam between the scheduler and the ranks: a step's work going down, its results coming up.

The ranks keep, per live sequence, its token ids and its block table; a plan carries only what is new. A sequence appears
first in ``StepPlan.starts``, then in spans, and is forgotten when ``StepPlan.dropped`` names it (finished, aborted or
preempted). ``dropped`` is applied before ``starts``. A preempted sequence that is resumed starts again under the same id.

What a step has hundreds of is a structure of msgspec's, for its speed alone: made in a tenth of a dataclass's time, and turned
into bytes and back in a quarter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from serve.types import BlockId, SamplingParams, SequenceId, TokenLogprob

DRAFTED: Final = -1
"""In ``Span.proposed``: whatever the ranks' draft model says there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A sequence the ranks do not know yet."""

    sequence: SequenceId
    index: int
    """Which of the request's ``num_sequences``; part of the sampling seed."""
    token_ids: tuple[int, ...]
    """Everything known so far: the prompt, then what was generated before a preemption."""
    num_prompt_tokens: int
    sampling: SamplingParams
    min_new_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    """EOS and stop ids; not sampled before ``min_new_tokens`` tokens were generated."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """When set, every span row p with p + 1 < num_prompt_tokens yields the logprob of token p + 1."""


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Positions ``[start, start + count)`` of one sequence, computed in this step.

    The last ``len(proposed)`` of them hold tokens of which nobody knows yet whether they will come: they are computed as if
    they had, and not appended to what the ranks know. Where one does not come, its position and those after it are computed
    again by a later span.

    The sequence's KV blocks, old ones and ``new_blocks`` in order, cover ``[0, start + count)``.
    """

    sequence: SequenceId
    start: int
    count: int
    continues: bool = False
    """True when the ranks append the token that they sampled in the sequence's last span, which was not known yet when this
    one was planned. Where that span ended in a fault it may be any token: nothing this span gives is looked at."""
    new_tokens: tuple[int, ...] = ()
    """Ids to append to what the ranks know (the token sampled in the last step), before the span is computed."""
    new_blocks: tuple[BlockId, ...] = ()
    """Block ids to append to the sequence's table; for a new sequence, its whole table, prefix-cache hits included."""
    sample: bool = False
    """True when the span ends at the last known token, so that its last row gives the next one."""
    proposed: tuple[int, ...] = ()
    """With ``sample``: ids that may follow the last known token, all or none of them ``DRAFTED``. The row of each gives the one
    after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, the same for every rank. A plan without spans only tells the ranks what to forget, or to exchange weights."""

    step: int
    starts: tuple[Start, ...] = ()
    spans: tuple[Span, ...] = ()
    dropped: tuple[SequenceId, ...] = ()
    swap: int | None = None
    """The weights to compute with from the next step on, by the number under which the ranks were told to prepare them. Such
    a plan has no spans and drops every sequence: nothing in the cache means anything afterwards."""

    @property
    def num_tokens(self) -> int:
        return sum(span.count for span in self.spans)


class Sampled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The token chosen after a span's last known token or, when all before it were chosen as proposed, after a proposed one."""

    sequence: SequenceId
    token_id: int
    logprob: TokenLogprob | None = None
    """Set when the sequence asked for logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Logprobs of prompt tokens ``[first, first + len(logprobs))`` of one sequence."""

    sequence: SequenceId
    first: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFault:
    """One sequence cannot go on (non-finite logits, no token allowed); the rest of the step is good."""

    sequence: SequenceId
    message: str
    not_finite: bool = False
    """Whether the model's own numbers are at fault, and not what the request asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Rank 0's answer: for each span with ``sample``, exactly one of ``sampled`` and ``faults`` names its sequence.

    ``sampled`` names it once, and once more for each proposed token that was chosen too, in their order. Where the row of a
    proposed token has a fault, the answers end before it.

    A span without ``sample`` may have a fault too: its prompt logprobs could not be told.
    """

    step: int
    sampled: tuple[Sampled, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    faults: tuple[SequenceFault, ...] = ()
    was_late: bool | None = None
    """Whether the device had nothing left to do when the step was launched there; ``None`` where the ranks launch none before
    the one before it was answered."""
    refused: str = ""
    """Why the ranks keep the weights that they had, of a plan with ``swap``; empty where they have exchanged them."""
