"""A step's tensors against the plans that told of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from serve.engine.plan import Span, Start, StepPlan
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker.batch import Batch, SequenceTable

SIZE = 4


@dataclass
class _Sequence:
    """What the test knows of one live sequence."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


def _start(number: int, tokens: list[int]) -> Start:
    return Start(
        sequence=SequenceId(number), index=0, token_ids=tuple(tokens), num_prompt_tokens=len(tokens), sampling=SamplingParams()
    )


def _span(draw: random.Random, number: int, sequence: _Sequence) -> Span:
    """Some of what is not computed yet; when nothing is left, one more token."""
    new = ()
    if sequence.computed == len(sequence.tokens):
        new = (draw.randrange(1000),)
        sequence.tokens += new
    count = draw.randint(1, len(sequence.tokens) - sequence.computed)
    needed = -(-(sequence.computed + count) // SIZE) - len(sequence.blocks)
    blocks = tuple(BlockId(draw.randrange(500)) for _ in range(needed))
    sequence.blocks += blocks
    span = Span(sequence=SequenceId(number), start=sequence.computed, count=count, new_tokens=new, new_blocks=blocks)
    sequence.computed += count
    return span


def _check(batch: Batch, spans: list[Span], live: dict[int, _Sequence]) -> None:
    ids, positions, slots = [], [], []
    for span in spans:
        sequence = live[span.sequence]
        where = range(span.start, span.start + span.count)
        ids += [sequence.tokens[p] for p in where]
        positions += where
        slots += [sequence.blocks[p // SIZE] * SIZE + p % SIZE for p in where]
    assert batch.input_ids.tolist() == [ids]
    assert batch.position_ids.tolist() == [positions]
    assert batch.layout.positions.tolist() == positions
    assert (batch.layout.positions.dtype, batch.layout.block_tables.dtype) == (torch.int32, torch.int32)
    assert batch.layout.slots.tolist() == slots
    assert batch.layout.block_tables.is_contiguous()
    assert len(set(batch.layout.table_rows)) == len(spans)
    for span, row in zip(spans, batch.layout.table_rows, strict=True):
        blocks = live[span.sequence].blocks
        assert batch.layout.block_tables[row, : len(blocks)].tolist() == blocks


def test_a_steps_tensors_are_what_the_plans_said() -> None:
    """Sequences come, grow past every size the tables had, are forgotten and come again, in any order."""
    draw = random.Random(11)
    table, live = SequenceTable(SIZE, torch.device("cpu")), dict[int, _Sequence]()
    for step in range(300):
        dropped = [n for n in live if draw.random() < 0.05]
        for number in dropped:
            del live[number]
        absent = [n for n in range(60) if n not in live]
        starts = [(n, draw.choices(range(1000), k=draw.randint(1, 40))) for n in draw.sample(absent, min(len(absent), 3))]
        live.update((n, _Sequence(list(tokens))) for n, tokens in starts)
        # A sequence has a span in the step it starts in.
        chosen = [n for n in live if draw.random() < 0.7 or any(n == started for started, _ in starts)]
        draw.shuffle(chosen)
        spans = [_span(draw, n, live[n]) for n in chosen]
        plan = StepPlan(
            step=step,
            starts=tuple(_start(n, tokens) for n, tokens in starts),
            spans=tuple(spans),
            dropped=tuple(SequenceId(n) for n in dropped),
        )
        batch = table.apply(plan)
        assert len(table) == len(live)
        if batch is not None:
            _check(batch, spans, live)


def test_the_tables_stay_where_they_are_while_nothing_outgrows_them() -> None:
    table = SequenceTable(SIZE, torch.device("cpu"))
    sequence = _Sequence([1, 2, 3])
    first = table.apply(StepPlan(step=0, starts=(_start(0, sequence.tokens),), spans=(_span(random.Random(0), 0, sequence),)))
    assert first is not None
    for step in range(1, 12):
        batch = table.apply(StepPlan(step=step, spans=(_span(random.Random(step), 0, sequence),)))
        assert batch is not None
        assert batch.layout.block_tables.data_ptr() == first.layout.block_tables.data_ptr()
