"""Rows as tensors: every row is evaluated once on however many ranks, and a row is made of the spans it says."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from finetune.data.batches import Microbatch, eval_batches, step_batches
from finetune.data.layout import Numbers
from finetune.data.pack import SampleOrder, Share
from finetune.data.rows import JoinedRows, Rows, SampleRows
from finetune.data.shards import ShardTokens
from finetune.data.targets import IGNORE_INDEX
from tests.finetune.data.shard_files import numbered_documents, write_shard

LENGTH, PAD = 6, 9999


def shards_of(
    folder: Path, draw: random.Random, count: int
) -> tuple[ShardTokens, list[list[list[int]]], list[list[list[int]]]]:
    """Shards of documents of two tokens or more, every other one with targets of its own; and what they hold."""
    documents, masks, folders, first = [], [], [], 0
    for number in range(count):
        some = numbered_documents([draw.randint(2, LENGTH + 1) for _ in range(draw.randint(1, 6))], first)
        first = some[-1][-1] + 1
        learned = [[draw.randint(0, 1) if number % 2 else 1 for _ in document] for document in some]
        folders.append(write_shard(folder / str(number), some, learned if number % 2 else None))
        documents.append(some)
        masks.append(learned)
    return ShardTokens(folders, "uint32"), documents, masks


def sample_rows(folder: Path, seed: int, *, isolated: bool = True) -> tuple[SampleRows, dict[int, int]]:
    """Rows of one to three short samples in any order, and for each token that follows another whether it is a target."""
    draw = random.Random(seed)
    tokens, documents, masks = shards_of(folder, draw, 3)
    samples, learned = [], {}
    for shard, (some, marks) in enumerate(zip(documents, masks, strict=True)):
        begin = 0
        for document, mask in zip(some, marks, strict=True):
            samples.append((shard, begin, len(document)))
            learned.update(zip(document[1:], mask[1:], strict=True))
            begin += len(document)
    draw.shuffle(samples)
    bounds, used = [0], 0
    for number, (_, _, length) in enumerate(samples):
        if used + length - 1 > LENGTH:
            bounds.append(number)
            used = 0
        used += length - 1
    table: Numbers = np.array(samples, np.int64)
    return SampleRows(tokens, table, np.array([*bounds, len(samples)]), LENGTH, PAD, isolated=isolated), learned


@pytest.mark.parametrize("seed", range(8))
def test_a_row_holds_its_samples_each_token_before_its_successor(tmp_path: Path, seed: int) -> None:
    rows, learned = sample_rows(tmp_path, seed)
    inputs, targets, segments = rows.rows(np.arange(rows.num_samples))
    assert segments is not None
    wanted = [token for token, mark in learned.items() if mark]
    assert sorted(targets[targets != IGNORE_INDEX].tolist()) == wanted, "each target once"
    for row in range(rows.num_samples):
        real = inputs[row] != PAD
        assert not (~real[:-1] & real[1:]).any(), "padding is at the end"
        assert (targets[row][~real] == IGNORE_INDEX).all()
        spans = rows.spans(row)
        assert sum(end - begin - 1 for _, begin, end in spans) == real.sum()
        assert segments[row][real].tolist() == [n for n, (_, begin, end) in enumerate(spans) for _ in range(end - begin - 1)]
        assert set(segments[row][~real].tolist()) <= {len(spans)}, "padding is one sample more"
        follows = (targets[row] == inputs[row] + 1) | (targets[row] == IGNORE_INDEX)
        assert follows.all(), "numbers count on within a document"
    assert rows.num_tokens == sum(end - begin for row in range(rows.num_samples) for _, begin, end in rows.spans(row))
    assert sample_rows(tmp_path / "joined", seed, isolated=False)[0].rows(np.array([0])).segments is None


@pytest.mark.parametrize("seed", range(8))
def test_a_joined_row_is_made_of_the_stretches_it_says(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    tokens, documents, masks = shards_of(tmp_path, draw, 4)
    sizes = [sum(map(len, some)) for some in documents]
    table = np.array([(shard, 0, size) for shard, size in enumerate(sizes)], np.int64)
    rows = JoinedRows(tokens, table, LENGTH)
    learned = [mark for some in masks for marks in some for mark in marks]
    assert rows.num_tokens == len(learned)
    inputs, targets, segments = rows.rows(np.arange(rows.num_samples))
    assert segments is None
    assert inputs.flatten().tolist() == list(range(rows.num_samples * LENGTH))
    expected = [place if learned[place] else IGNORE_INDEX for place in range(1, rows.num_samples * LENGTH + 1)]
    assert targets.flatten().tolist() == expected
    for row in range(rows.num_samples):
        told = [int(token) for shard, begin, end in rows.spans(row) for token in tokens.read(shard, begin, end)[0]]
        assert told == list(range(row * LENGTH, (row + 1) * LENGTH + 1)), "with the last one, which is only a target"


def counted(batches: list[Microbatch]) -> int:
    return sum(batch.num_targets for batch in batches)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("limit", [0, 1, 3, 1000])
def test_every_rank_evaluates_as_many_batches_and_all_together_every_row_once(tmp_path: Path, seed: int, limit: int) -> None:
    rows: Rows = sample_rows(tmp_path, seed)[0]
    draw = random.Random(seed)
    ranks, micro = draw.choice([1, 2, 3]), draw.choice([1, 2, 5])
    shares = [eval_batches(rows, Share(rank, ranks, micro, 1), limit) for rank in range(ranks)]
    count = min(limit, rows.num_samples) if limit else rows.num_samples
    assert {len(share) for share in shares} == {-(-count // (ranks * micro))}, "ZeRO waits for who has fewer"
    assert {batch.inputs.shape for share in shares for batch in share} == {(micro, LENGTH)}
    alone = eval_batches(rows, Share(0, 1, count, 1), count)
    assert sum(map(counted, shares)) == counted(alone)
    targets = [batch.targets[batch.targets != IGNORE_INDEX].tolist() for share in shares for batch in share]
    assert sorted(chain.from_iterable(targets)) == sorted(alone[0].targets[alone[0].targets != IGNORE_INDEX].tolist())


def test_a_step_s_batches_are_its_rows_in_the_order_of_the_run(tmp_path: Path) -> None:
    rows: Rows = sample_rows(tmp_path, 1)[0]
    order = SampleOrder(rows.num_samples, 3)
    first = 5 * rows.num_samples - 2
    taken = [step_batches(rows, order, Share(rank, 2, 1, 3), first) for rank in range(2)]
    indices = order.at(first, 6)
    for turn in range(3):
        for rank in range(2):
            wanted = rows.rows(indices[2 * turn + rank : 2 * turn + rank + 1]).inputs
            assert taken[rank][turn].inputs.tolist() == wanted.tolist()
