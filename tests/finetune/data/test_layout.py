"""Which tokens go into which rows: over random sources every token is where the settings put it, and nowhere twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.data.layout import Layout, Numbers, Settings, lay_out
from finetune.data.rows import JoinedRows
from finetune.data.shards import ShardTokens
from finetune.errors import DataError
from tests.finetune.data.shard_files import numbered_documents, write_shard

SEEDS = range(6)
USUAL = Settings(seq_len=10, packing="isolate", too_long="refuse", seed=3, eval_fraction=0.0)


class Laid:
    """What one call of ``lay_out`` left behind, read back as token ids."""

    def __init__(
        self,
        folder: Path,
        sources: Sequence[Sequence[Sequence[list[int]]]],
        settings: Settings,
        *,
        held_out: Sequence[Sequence[Sequence[list[int]]]] = (),
        weights: Sequence[float] | None = None,
        cuttable: bool = False,
        masks: Sequence[Sequence[int]] | None = None,
    ) -> None:
        shards: list[Path] = []

        def write(source: Sequence[Sequence[list[int]]]) -> list[Path]:
            made = []
            for documents in source:
                number = len(shards)
                shards.append(write_shard(folder / f"shard-{number}", documents, masks, file=f"file-{number}.parquet"))
                made.append(shards[-1])
            return made

        train, others = [write(source) for source in sources], [write(source) for source in held_out]
        self.folder, self.tokens = folder, ShardTokens(shards, "uint32")
        given = [1.0] * (len(train) + len(others)) if weights is None else weights
        self.made: Layout = lay_out(train, others, given, [cuttable] * len(given), settings, folder)

    def table(self, side: str) -> Numbers:
        found: Numbers = np.load(self.folder / f"{side}.npy")
        return found

    def stretches(self, side: str) -> list[list[int]]:
        """The ids of each stretch or sample, in order."""
        return [self.tokens.read(s, begin, begin + length)[0].tolist() for s, begin, length in self.table(side).tolist()]

    def ids(self, side: str) -> list[int]:
        return [token for stretch in self.stretches(side) for token in stretch]

    def rows(self, side: str) -> list[list[list[int]]]:
        """The samples of each row."""
        samples, bounds = self.stretches(side), np.load(self.folder / f"{side}.rows.npy").tolist()
        assert (bounds[0], bounds[-1]) == (0, len(samples))
        return [samples[begin:end] for begin, end in pairwise(bounds)]


def random_sources(draw: random.Random, *, longest: int) -> list[list[list[list[int]]]]:
    """One to three sources of none to three shards each; every id of them all is there once."""
    first, sources = 0, []
    for _ in range(draw.randint(1, 3)):
        source = []
        for _ in range(draw.randint(0, 3)):
            lengths = [draw.randint(1, longest) for _ in range(draw.randint(0, 8))]
            source.append(numbered_documents(lengths, first))
            first += sum(lengths)
        sources.append(source)
    return sources


def documents_of(sources: Sequence[Sequence[Sequence[list[int]]]]) -> list[list[int]]:
    return [document for source in sources for shard in source for document in shard]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_joined_stream_and_what_is_held_out_of_it_hold_every_token_once(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    sources = random_sources(draw, longest=40)
    everything = [token for document in documents_of(sources) for token in document]
    settings = replace(USUAL, packing="join", seed=seed, eval_fraction=draw.choice([0.0, 0.05, 0.3]))
    laid = Laid(tmp_path, sources, settings)
    assert sorted(laid.ids("train") + laid.ids("eval")) == everything
    assert laid.ids("train") == sorted(laid.ids("train")), "the stream keeps the order of sources, shards and documents"
    assert (laid.made.train_tokens, laid.made.eval_tokens) == (len(laid.ids("train")), len(laid.ids("eval")))
    wanted = max(round(settings.eval_fraction * len(everything)), 11) if settings.eval_fraction else 0
    assert laid.made.eval_tokens == (wanted if wanted <= len(everything) - 11 else 0)
    assert laid.made.dropped == 0


@pytest.mark.parametrize(("tokens", "rows"), [(0, 0), (1, 0), (10, 0), (11, 1), (20, 1), (21, 2), (22, 2)])
def test_a_joined_row_needs_its_length_and_one_more(tmp_path: Path, tokens: int, rows: int) -> None:
    laid = Laid(tmp_path, [[numbered_documents([tokens] if tokens else [])]], replace(USUAL, packing="join"))
    assert (laid.made.train_tokens, laid.made.train_rows) == (tokens, rows)
    opened = JoinedRows(laid.tokens, laid.table("train"), 10)
    assert (opened.num_tokens, opened.num_samples) == (tokens, rows), "rows are counted alike where they are opened"
    for row in range(rows):
        inputs, targets, _ = opened.rows(np.array([row]))
        assert inputs[0].tolist() == list(range(10 * row, 10 * row + 10))
        assert targets[0].tolist() == list(range(10 * row + 1, 10 * row + 11))


def test_neighbours_of_a_joined_stream_are_one_stretch_and_gaps_part_them(tmp_path: Path) -> None:
    laid = Laid(tmp_path, [[numbered_documents([3, 4, 5]), numbered_documents([6], 12)]], replace(USUAL, packing="join"))
    assert laid.table("train").tolist() == [[0, 0, 12], [1, 0, 6]]
    parted = Laid(
        tmp_path / "parted",
        [[numbered_documents([20] * 6)]],
        replace(USUAL, packing="join", eval_fraction=0.2, seed=1),
    )
    for side in ("train", "eval"):
        table = parted.table(side)
        assert all(begin + length < following for (_, begin, length), (_, following, _) in pairwise(table.tolist())), side
    assert len(parted.table("train")) + len(parted.table("eval")) < 6


def test_the_document_that_would_go_beyond_the_share_is_cut_its_head_trains_and_its_tail_evaluates(tmp_path: Path) -> None:
    laid = Laid(tmp_path, [[numbered_documents([100])]], replace(USUAL, packing="join", eval_fraction=0.25))
    assert laid.ids("train") == list(range(75))
    assert laid.ids("eval") == list(range(75, 100))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("packing", ["isolate", "none"])
def test_samples_are_whole_on_one_side_and_rows_hold_each_of_them_once(tmp_path: Path, packing: str, seed: int) -> None:
    draw = random.Random(seed)
    sources = random_sources(draw, longest=11)
    settings = replace(USUAL, packing=packing, seed=seed, eval_fraction=draw.choice([0.0, 0.01, 0.4]))
    laid = Laid(tmp_path, sources, settings)
    with_target = [tuple(document) for document in documents_of(sources) if len(document) > 1]
    sides = {side: [tuple(sample) for sample in laid.stretches(side)] for side in ("train", "eval")}
    assert Counter(sides["train"] + sides["eval"]) == Counter(with_target), "one token alone has no target, and is no sample"
    for side, count in (("train", laid.made.train_rows), ("eval", laid.made.eval_rows)):
        rows = laid.rows(side)
        assert len(rows) == count
        assert all(0 < sum(len(sample) - 1 for sample in row) <= 10 for row in rows)
        if packing == "none":
            assert all(len(row) == 1 for row in rows)
    if settings.eval_fraction == 0.0:
        assert not sides["eval"]


@pytest.mark.parametrize(("count", "held"), [(1, 0), (2, 1), (3, 1)])
def test_of_few_samples_one_is_held_out_and_one_always_trains(tmp_path: Path, count: int, held: int) -> None:
    for fraction in (0.01, 0.1):
        laid = Laid(tmp_path / str(fraction), [[numbered_documents([5] * count)]], replace(USUAL, eval_fraction=fraction))
        assert (len(laid.stretches("train")), len(laid.stretches("eval"))) == (count - held, held)
    greedy = Laid(tmp_path / "all", [[numbered_documents([5] * count)]], replace(USUAL, eval_fraction=0.99))
    assert len(greedy.stretches("train")) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_long_text_is_cut_into_samples_that_predict_every_token_but_the_first_once(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    sources = random_sources(draw, longest=60)
    laid = Laid(tmp_path, sources, replace(USUAL, seed=seed), cuttable=True)
    samples = laid.stretches("train")
    assert all(2 <= len(sample) <= 11 for sample in samples)
    read = Counter(token for sample in samples for token in sample[:-1])
    predicted = Counter(token for sample in samples for token in sample[1:])
    documents = [document for document in documents_of(sources) if len(document) > 1]
    assert read == Counter(token for document in documents for token in document[:-1])
    assert predicted == Counter(token for document in documents for token in document[1:])
    assert laid.made.dropped == 0


@pytest.mark.parametrize("length", [11, 12, 21, 22])
def test_a_cut_at_the_very_length_of_a_row_leaves_no_sample_without_a_target(tmp_path: Path, length: int) -> None:
    laid = Laid(tmp_path, [[numbered_documents([length])]], USUAL, cuttable=True)
    assert (
        sorted(map(len, laid.stretches("train")), reverse=True)
        == {
            11: [11],
            12: [11, 2],
            21: [11, 11],
            22: [11, 11, 2],
        }[length]
    )


def test_a_sample_that_is_too_long_is_refused_by_file_and_place_with_its_length_and_the_rule(tmp_path: Path) -> None:
    sources = [[numbered_documents([11, 3])], [numbered_documents([2, 11, 12, 40], 14)]]
    with pytest.raises(DataError) as refused:
        Laid(tmp_path, sources, USUAL)
    assert str(refused.value) == (
        "file-1.parquet, row 3: has 12 tokens; at most 11 fit: the 10 that a row holds (data.seq_len), and a last one that is "
        "only predicted. Raise data.seq_len, or set data.too_long to cut or drop"
    )


def test_what_is_too_long_is_dropped_or_keeps_its_head_as_asked(tmp_path: Path) -> None:
    documents = numbered_documents([11, 12, 30, 4])
    dropped = Laid(tmp_path / "drop", [[documents]], replace(USUAL, too_long="drop"))
    assert (sorted(dropped.stretches("train")), dropped.made.dropped) == ([documents[0], documents[3]], 2)
    cut = Laid(tmp_path / "cut", [[documents]], replace(USUAL, too_long="cut"))
    heads = [documents[0], documents[1][:11], documents[2][:11], documents[3]]
    assert (sorted(cut.stretches("train")), cut.made.dropped) == (heads, 0)


def test_a_head_without_a_target_teaches_nothing_and_is_dropped(tmp_path: Path) -> None:
    documents = numbered_documents([20, 20, 20, 20, 3])
    only = {"in the head": 10, "first of all": 0, "behind the cut": 11, "nowhere": None, "short": None}
    masks = [
        [int(place == at) for place in range(len(document))] for document, at in zip(documents, only.values(), strict=True)
    ]
    laid = Laid(tmp_path, [[documents]], replace(USUAL, too_long="cut"), masks=masks)
    assert sorted(laid.stretches("train")) == [documents[0][:11], documents[4]], "a first token is predicted by nothing"
    assert laid.made.dropped == 3


@pytest.mark.parametrize(("weight", "copies"), [(1.0, (1, 0)), (2.0, (2, 0)), (2.5, (2, 4)), (0.25, (0, 2)), (1.99, (1, 8))])
def test_a_weight_repeats_a_source_and_a_fraction_some_of_its_documents_once_more(
    tmp_path: Path, weight: float, copies: tuple[int, int]
) -> None:
    documents = numbered_documents([4] * 8)
    other = numbered_documents([3] * 5, 100)
    laid = Laid(tmp_path, [[documents], [other]], USUAL, weights=[weight, 1.0])
    counts = Counter(tuple(sample) for sample in laid.stretches("train"))
    whole, more = copies
    assert Counter(counts[tuple(document)] for document in documents) == Counter({whole: 8 - more, whole + 1: more}) - Counter()
    assert all(counts[tuple(document)] == 1 for document in other), "the other source keeps its own weight"


def test_evaluation_files_are_laid_out_by_their_own_weights_and_nothing_of_training_is_held_out(tmp_path: Path) -> None:
    train, held = numbered_documents([5] * 6), numbered_documents([4] * 3, 1000)
    settings = replace(USUAL, eval_fraction=0.5)
    laid = Laid(tmp_path, [[train]], settings, held_out=[[held]], weights=[1.0, 2.0])
    assert sorted(laid.stretches("train")) == train
    assert sorted(laid.stretches("eval")) == sorted([*held, *held])
    split = Laid(tmp_path / "split", [[train]], settings, weights=[2.0])
    assert Counter(Counter(map(tuple, split.stretches("eval"))).values()) == Counter({1: 3}), "weights repeat what trains alone"
    assert set(Counter(map(tuple, split.stretches("train"))).values()) == {2}


def test_the_same_seed_gives_the_same_rows_and_another_one_others(tmp_path: Path) -> None:
    def laid(name: str, seed: int) -> list[Any]:
        settings = replace(USUAL, seed=seed, eval_fraction=0.3)
        found = Laid(tmp_path / name, [[numbered_documents([4] * 20)]], settings, weights=[1.5])
        return [found.rows("train"), found.rows("eval")]

    assert laid("one", 5) == laid("again", 5)
    assert laid("one", 5) != laid("other", 6)


def test_sources_without_a_document_give_no_rows(tmp_path: Path) -> None:
    for packing in ("join", "isolate", "none"):
        laid = Laid(tmp_path / packing, [[], [[]]], replace(USUAL, packing=packing, eval_fraction=0.1))
        assert laid.made == Layout(train_tokens=0, train_rows=0, eval_tokens=0, eval_rows=0, dropped=0)
        assert laid.ids("train") == laid.ids("eval") == []
