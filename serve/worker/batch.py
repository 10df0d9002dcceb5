"""What a rank knows of the live sequences, and how a step plan becomes tensors."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from serve.engine.plan import Span, Start, StepPlan
from serve.model.attention import StepLayout
from serve.model.sending import send
from serve.types import LengthRule, SequenceId
from serve.worker.block_tables import BlockTables
from serve.worker.decode_inputs import DecodeInputs
from serve.worker.sampling.seen import Seen

UNKNOWN: Final = -1
"""A token that was drawn on the device and not read yet; on ranks that do not answer it never is."""


@dataclass(slots=True)
class SequenceState:
    """One live sequence on this rank: the token ids and blocks that plans have told of so far."""

    start: Start
    token_ids: list[int]
    """The last one may be ``UNKNOWN``; on ranks that do not answer, any that was generated."""
    blocks: list[int] = field(default_factory=list)
    table_row: int = 0
    """Where its blocks stand in the rank's ``BlockTables``."""
    drawn: int = 0
    """The token that its last span sampled, on the rank that answers; on the others, what it told them. Or ``UNKNOWN``."""
    drafted: tuple[int, tuple[int, ...]] = (0, ())
    """Positions that the draft model has computed of known tokens, and what it was given after them as if it were known."""
    _seen: Seen | None = None

    @property
    def supposed(self) -> None:
        """Nothing of it depends on a token that may not come."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.start.num_prompt_tokens

    @property
    def is_read(self) -> bool:
        """Whether the last token is known to the host."""
        return self.token_ids[-1] != UNKNOWN

    def keep(self, token_id: int) -> None:
        """Remember what its last span sampled; or the one before, where it continued with that while it was ``UNKNOWN``."""
        if self.is_read:
            self.drawn = token_id
        else:
            self.token_ids[-1] = token_id  # and what it draws by it is on its way

    def seen(self) -> Seen:
        """What prompt and output hold so far, counted from the first call on; without a last token that is not read."""
        if self._seen is None:
            self._seen = Seen()
        self._seen.follow(self.token_ids, self.start.num_prompt_tokens, len(self.token_ids) - (not self.is_read))
        return self._seen


@dataclass(frozen=True, slots=True)
class Supposed:
    """A live sequence as it will be if some tokens come next, which a plan proposes."""

    state: SequenceState
    tokens: tuple[int, ...]
    """At least one."""

    @property
    def start(self) -> Start:
        return self.state.start

    @property
    def is_read(self) -> bool:
        """The tokens are known: they are proposed."""
        return True

    @property
    def supposed(self) -> int:
        """The token that the row before this one must give; otherwise nothing that this row gives counts."""
        return self.tokens[-1]

    @property
    def num_tokens(self) -> int:
        return self.state.num_tokens + len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return self.state.num_output_tokens + len(self.tokens)

    def seen(self) -> Seen:
        """What prompt, output and the supposed tokens hold."""
        return self.state.seen().supposing(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's tensors.  T tokens, all spans one after the other."""

    input_ids: Tensor
    """int64 [1, T], more where ``DecodeInputs`` has room for more rows"""
    position_ids: Tensor
    """int64 [1, T], likewise"""
    layout: StepLayout
    sample_rows: tuple[int, ...]
    """Rows of [0, T) whose next token is wanted, in the order of ``sampled``."""
    sampled: tuple[SequenceState | Supposed, ...]
    """What each of these rows is of; rows of one sequence stand together, each with one proposed token more."""
    prompt_rows: tuple[tuple[SequenceState, int, int, int], ...]
    """(sequence, first row, first position, rows): prompt positions whose successor's logprob is wanted."""

    @property
    def read_rows(self) -> tuple[int, ...]:
        """The rows whose last hidden states are read, ascending."""
        rows = set(self.sample_rows).union(*(range(first, first + count) for _, first, _, count in self.prompt_rows))
        return tuple(sorted(rows))


class SequenceTable:
    """The live sequences; follows the plans exactly as ``serve.engine.plan`` states them."""

    def __init__(
        self, block_tokens: int, device: torch.device, rule: LengthRule | None = None, decoding: DecodeInputs | None = None
    ) -> None:
        """``decoding``: where the inputs of steps of one token of each sequence belong; ``None``: in tensors of their own."""
        self._decoding = decoding
        self._block_tokens = block_tokens
        self._device = device
        self._rule = rule
        self._sequences: dict[int, SequenceState] = {}
        self._tables = BlockTables(device)

    def __len__(self) -> int:
        return len(self._sequences)

    def drawn(self, sequences: Iterable[SequenceId]) -> list[int]:
        """What the last span of each of these sequences sampled."""
        return [self._sequences[sequence].drawn for sequence in sequences]

    def keep_drawn(self, drawn: Iterable[tuple[SequenceId, int]]) -> None:
        """Remember what spans sampled, for those that continue with it."""
        for sequence, token_id in drawn:
            self._sequences[sequence].keep(token_id)

    def apply(self, plan: StepPlan) -> Batch | None:
        """Forget, learn and extend what the plan says; the step's tensors, or ``None`` when it computes nothing."""
        self.learn(plan)
        return self.batch(plan.spans) if plan.spans else None

    def state(self, sequence: SequenceId) -> SequenceState:
        """What the rank keeps of a live sequence."""
        return self._sequences[sequence]

    def learn(self, plan: StepPlan) -> None:
        """Forget, learn and extend what the plan says."""
        for dropped in plan.dropped:
            self._tables.close(self._sequences.pop(dropped).table_row)
        for start in plan.starts:
            self._sequences[start.sequence] = SequenceState(start, list(start.token_ids), table_row=self._tables.open())
        for span in plan.spans:
            state = self._sequences[span.sequence]
            if span.continues:
                state.token_ids.append(state.drawn)
            state.token_ids.extend(span.new_tokens)
            if span.new_blocks:
                self._tables.extend(state.table_row, len(state.blocks), span.new_blocks)
                state.blocks.extend(span.new_blocks)

    def batch(self, spans: tuple[Span, ...], drawn_K: Tensor | None = None) -> Batch:
        """The tensors of a step that computes these spans, of a plan that was learnt.

        Args:
            drawn_K: the tokens of those that continue, int64 on the device; without it, the host knows them.
        """
        states = [self._sequences[span.sequence] for span in spans]
        parts = [
            (state, span.start, [state.token_ids[span.start]])
            if span.count == 1  # then the token is a known one, and making no slices is most of the cost
            else (state, span.start, [*state.token_ids[span.start : span.start + span.count], *span.proposed])
            for span, state in zip(spans, states, strict=True)
        ]
        if self._decoding is not None and self._decoding.fits(len(parts)) and all(len(tokens) == 1 for _, _, tokens in parts):
            step = self._decoding.fill([self._row(*part) for part in parts], self._tables.written())
            input_ids, position_ids, layout = step.input_ids, step.position_ids, step.layout
        else:
            staged_3T, layout = self.staged(parts, self._lengths(spans, states))
            input_ids, position_ids = staged_3T[:1], staged_3T[1:2]
        starts = layout.query_starts[: len(spans) + 1]
        if drawn_K is not None:
            _put(input_ids[0], [end - 1 for span, end in zip(spans, starts[1:], strict=True) if span.continues], drawn_K)
        sampling: list[tuple[int, SequenceState | Supposed]] = []
        for span, state, end in zip(spans, states, starts[1:], strict=True):
            if span.proposed:
                sampling.extend(_sample_rows(span, state, end))
            elif span.sample:
                sampling.append((end - 1, state))
        return Batch(
            input_ids=input_ids,
            position_ids=position_ids,
            layout=layout,
            sample_rows=tuple(row for row, _ in sampling),
            sampled=tuple(state for _, state in sampling),
            prompt_rows=tuple(_prompt_rows(spans, states, starts)),
        )

    def _row(self, state: SequenceState, position: int, tokens: list[int]) -> tuple[int, int, int, int, int]:
        """What ``DecodeInputs`` is told of a sequence."""
        size = self._block_tokens
        slot = state.blocks[position // size] * size + position % size
        return tokens[0], position, slot, state.table_row, self._length(state, position)

    def staged(
        self, parts: Sequence[tuple[SequenceState, int, list[int]]], lengths: Tensor | None = None
    ) -> tuple[Tensor, StepLayout]:
        """Ids, positions and slots, int64 [3, T], and the layout of a step over parts of some sequences.

        Args:
            parts: of each sequence its first position and the tokens from there on, for which it has blocks.
            lengths: see ``StepLayout``.
        """
        size = self._block_tokens
        counts = [len(tokens) for _, _, tokens in parts]
        if counts.count(1) == len(parts):  # a token each, as in most steps of many
            ids = [tokens[0] for _, _, tokens in parts]
            positions = [first for _, first, _ in parts]
            slots = [state.blocks[first // size] * size + first % size for state, first, _ in parts]
        else:
            ids, positions, slots = [], [], []
            for state, first, tokens in parts:
                end = first + len(tokens)
                ids.extend(tokens)
                positions.extend(range(first, end))
                slots.extend([state.blocks[p // size] * size + p % size for p in range(first, end)])
        # One transfer for all that a step's tokens are; torch reads an array far faster than lists.
        numbers = array("q", ids + positions + slots)
        staged_3T = torch.frombuffer(numbers, dtype=torch.int64).view(3, -1) if ids else torch.empty(3, 0, dtype=torch.int64)
        staged_3T = send(staged_3T, self._device)
        return staged_3T, StepLayout(
            slots=staged_3T[2],
            positions=staged_3T[1].int(),
            query_starts=tuple(itertools.accumulate(counts, initial=0)),
            context_lengths=tuple([first + count for (_, first, _), count in zip(parts, counts, strict=True)]),
            block_tables=self._tables.written(),
            table_rows=tuple([state.table_row for state, _, _ in parts]),
            lengths=lengths,
        )

    def _length(self, state: SequenceState, position: int) -> int:
        """The length by which a position is computed, where that depends on one."""
        rule, start = self._rule, state.start
        return 1 if rule is None else max(rule.first_length(start.num_prompt_tokens, len(start.token_ids)), position + 1)

    def _lengths(self, spans: tuple[Span, ...], states: list[SequenceState]) -> Tensor | None:
        rule = self._rule
        if rule is None:
            return None
        lengths: list[int] = []
        for span, state in zip(spans, states, strict=True):
            lengths.extend(self._length(state, position) for position in range(span.start, span.start + span.count))
        return send(torch.tensor(lengths, dtype=torch.int64), self._device) if max(lengths) > rule.plain_tokens else None


def _put(ids_T: Tensor, rows: list[int], tokens_K: Tensor) -> None:
    """Write tokens to some rows of a step's ids; the host waits for nothing."""
    if rows == list(range(len(rows))):
        ids_T[: len(rows)].copy_(tokens_K)
    else:
        ids_T.index_copy_(0, send(torch.tensor(rows), ids_T.device), tokens_K)


def _sample_rows(span: Span, state: SequenceState, end: int) -> list[tuple[int, SequenceState | Supposed]]:
    """The rows of a span whose next token is wanted, which ends before row ``end``: that of its last known token, and those
    of the proposed ones."""
    proposed, last_known = span.proposed, end - 1 - len(span.proposed)
    rows: list[tuple[int, SequenceState | Supposed]] = [(last_known, state)]
    rows.extend((last_known + count, Supposed(state, proposed[:count])) for count in range(1, len(proposed) + 1))
    return rows


def _prompt_rows(
    spans: tuple[Span, ...], states: list[SequenceState], starts: tuple[int, ...]
) -> list[tuple[SequenceState, int, int, int]]:
    rows = []
    for i, (span, state) in enumerate(zip(spans, states, strict=True)):
        if state.start.prompt_logprobs is None:
            continue
        count = min(span.start + span.count, state.start.num_prompt_tokens - 1) - span.start
        if count > 0:
            rows.append((state, starts[i], span.start, count))
    return rows
