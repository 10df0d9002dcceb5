"""A step while it is planned."""

from __future__ import annotations

from dataclasses import dataclass, field

from serve.engine.plan import Span, Start
from serve.engine.sequence import Sequence


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    budget: int
    spare: int = 0
    """Proposed tokens that may still be computed; below 0 where the debts are larger than the budget."""
    starts: list[Start] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    making: set[bytes] = field(default_factory=set)
    """Digests of the prompts' blocks that this step fills, which can be shared once it has ended."""
    num_last: int = 0
    """Running sequences that a step under way takes to their end, or out of the batch: they have left before the next plan."""
    has_preempted: bool = False

    def add_span(self, seq: Sequence, count: int, block_tokens: int, proposed: tuple[int, ...] = ()) -> None:
        """Plan ``count`` positions and those of what is proposed after them, with all the ranks have to learn for them.

        They count as computed from now on, and the token that they sample as pending.
        """
        num_tokens, num_blocks = seq.num_known_ahead, len(seq.table)
        samples = seq.num_computed + count == num_tokens and seq.samples
        self.spans.append(
            Span(
                sequence=seq.id,
                start=seq.num_computed,
                count=count + len(proposed),
                continues=seq.num_known < num_tokens and seq.num_pending > 0,
                new_tokens=tuple(seq.token_ids[seq.num_known :]) if num_tokens > seq.num_known else (),
                new_blocks=tuple(seq.table[seq.num_sent_blocks :]) if num_blocks > seq.num_sent_blocks else (),
                sample=samples,
                proposed=proposed,
            )
        )
        seq.num_computed += count
        seq.num_pending += samples
        seq.num_known = num_tokens
        seq.num_sent_blocks = num_blocks
        self.budget -= count + len(proposed)
        if seq.chain is not None and count > 1:
            full = seq.num_computed // block_tokens
            self.making.update(seq.chain.digest(index) for index in range(seq.num_registered, full))
