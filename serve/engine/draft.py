"""A step while it is planned."""

from __future__ import annotations

from dataclasses import dataclass, field

from serve.engine.plan import Span, Start
from serve.engine.sequence import Sequence


@dataclass(slots=True)
class Draft:
    """What a step's plan has so far, and what may still come into it."""

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
        # Once for each sequence in each step: what is read often has a name here.
        start, known, pending = seq.num_computed, seq.num_known, seq.num_pending
        sent, num_blocks = seq.num_sent_blocks, len(seq.table)
        num_tokens, positions, end = len(seq.token_ids) + pending, count + len(proposed), start + count
        samples = end == num_tokens and seq.samples
        self.spans.append(
            Span(
                sequence=seq.id,
                start=start,
                count=positions,
                continues=known < num_tokens and pending > 0,
                new_tokens=tuple(seq.token_ids[known:]) if num_tokens > known else (),
                new_blocks=tuple(seq.table[sent:]) if num_blocks > sent else (),
                sample=samples,
                proposed=proposed,
            )
        )
        seq.num_computed = end
        seq.num_pending = pending + samples
        seq.num_known = num_tokens
        seq.num_sent_blocks = num_blocks
        self.budget -= positions
        if count > 1 and seq.chain is not None:
            full = end // block_tokens
            self.making.update(seq.chain.digest(index) for index in range(seq.num_registered, full))
