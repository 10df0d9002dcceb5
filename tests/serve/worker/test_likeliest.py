"""A model whose likeliest tokens are found by a narrower copy of its head gives the tokens that it gives without one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Final

import pytest
from torch import Tensor

from serve.model.narrow_head import Likeliest, NarrowHead
from serve.model.pace import Pace
from serve.types import SamplingParams
from serve.worker.loader import RankModel
from serve.worker.packing import Packing
from serve.worker.parallel import Ranks
from serve.worker.rank_process import rank_environment
from serve.worker.recorded_steps import RecordedSteps
from serve.worker.rest import Rest
from serve.worker.runner import Runner
from tests.serve.worker.family_worker import NEW_TOKENS, PROMPTS, generate, load
from tests.serve.worker.test_loader import VARIANTS
from tests.support import reference, warm
from tests.support.models import save

pytestmark = pytest.mark.usefixtures("one_thread_of_kernels")

ALONE: Final = Ranks(0, 1)
FAMILIES: Final = ("gpt_neox", "gpt2", "llama", "gptj", "opt", "mixtral")
"""Heads of their own, tied ones, one with a bias, one behind a projection."""


class Counted(NarrowHead):
    """One that counts the rows that it was asked for."""

    rows = 0
    fails = False

    def likeliest(self, hidden_RI: Tensor) -> Likeliest | None:
        self.rows += len(hidden_RI)
        return None if self.fails else super().likeliest(hidden_RI)


def copied(model: RankModel) -> Counted:
    narrow = NarrowHead.of(model.head, model.kernels, model.filler.num_bytes)
    assert narrow is not None, "the head is most of a small model"
    assert model.kernels is not None
    # For how many rows it pays depends on the processor; here it is asked for all of a step.
    kind = narrow.kind._replace(most_rows=max(len(PROMPTS), narrow.kind.most_rows))
    counted = Counted(model.head, model.kernels, kind)
    counted.build(Pace(lambda _: None))
    return counted


def saved(name: str, folder: Path) -> Path:
    family, changes = VARIANTS[name]
    return save(family, folder, with_tokenizer=False, **changes)


def loaded(folder: Path, dtype: str) -> RankModel:
    model = load(folder, 1, ALONE, dtype)
    Packing([model.filler.take_waiting()], Rest()).finish()
    return model


def tokens(
    model: RankModel, narrow: NarrowHead | None, *, replays: bool, sampling: tuple[SamplingParams, ...] = ()
) -> list[list[int]]:
    runner = Runner(model, ALONE, None, narrow)
    if replays:
        assert isinstance(runner.graphs, RecordedSteps)
        runner.graphs._patience = 0
        runner.graphs.capture()
    found = generate(runner, ALONE, PROMPTS, sampling)
    if replays:
        assert isinstance(runner.graphs, RecordedSteps)
        assert len(PROMPTS) in runner.graphs.sizes or len(PROMPTS) - 1 in runner.graphs.sizes
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_the_head(name: str, dtype: str, tmp_path: Path) -> None:
    model = loaded(saved(name, tmp_path / "model"), dtype)
    expected = tokens(model, None, replays=False)
    narrow = copied(model)
    for replays in (False, True):
        narrow.rows = 0
        assert tokens(model, narrow, replays=replays) == expected
        assert narrow.rows == sum(map(len, expected)), "every token was looked for so"


def test_where_it_finds_none_the_head_is_asked(tmp_path: Path) -> None:
    model = loaded(saved("gpt_neox", tmp_path / "model"), "float32")
    expected, narrow = tokens(model, None, replays=False), copied(model)
    narrow.fails = True
    for replays in (False, True):
        assert tokens(model, narrow, replays=replays) == expected
    assert narrow.rows == 2 * sum(map(len, expected))


def test_beside_a_row_that_is_sampled_all_logits_are_computed(tmp_path: Path) -> None:
    model = loaded(saved("llama", tmp_path / "model"), "float32")
    sampling = (SamplingParams(), SamplingParams(temperature=0.8, seed=5), SamplingParams())
    expected, narrow = tokens(model, None, replays=True, sampling=sampling), copied(model)
    assert tokens(model, narrow, replays=True, sampling=sampling) == expected
    assert narrow.rows < len(expected[0]), "prompts end at different steps, and then one of them is alone"


def test_a_head_whose_logits_are_capped_is_not_copied(tmp_path: Path) -> None:
    """Two logits that differ may be the same when they are capped, and then the first is the likeliest."""
    model = loaded(saved("gemma2", tmp_path / "model"), "float32")
    assert NarrowHead.of(model.head, model.kernels, 1) is None


def test_it_is_copied_when_all_is_packed_and_anew_when_weights_have_changed(tmp_path: Path) -> None:
    model = load(saved("gpt_neox", tmp_path / "model"), 1, ALONE, "float32")
    made = NarrowHead.of(model.head, model.kernels, model.filler.num_bytes)
    assert made is not None
    packing = Packing([model.filler.take_waiting()], Rest(), made)
    packing.finish()
    with packing._one_at_a_time:
        pass
    while not made.serves(1):
        packing._rest.wait(0.01)
    product = model.head.forward
    matmul = product.matmul  # type: ignore[attr-defined]  # it is a packed product
    product.matmul = type(matmul)(model.kernels, matmul.panels, matmul.bias_O, "none")  # type: ignore[attr-defined]  # as above
    assert not made.serves(1)
    packing.go_on()
    while not made.serves(1):
        packing._rest.wait(0.01)


def test_ranks_may_have_their_copies_at_different_times(tmp_path: Path) -> None:
    """Steps that are proved are computed twice, by all ranks at once: else they would add up parts of different steps."""
    folder = save("gpt_neox", tmp_path / "model", with_tokenizer=False, vocab_size=8192)
    model = reference.load(folder)
    expected = [reference.greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    ranks = [
        warm.start("tests.serve.worker.uneven_worker", [str(rank), "2", str(tmp_path)], rank_environment(rank, 2, "cpu"))
        for rank in range(2)
    ]
    said = warm.all_ended(ranks, 300.0)
    assert [rank.returncode for rank in ranks] == [0, 0], said
    told = json.loads((tmp_path / "uneven.json").read_text())
    assert all(each == expected for each in told["tokens"])
    assert told["sizes"], "steps were replayed to the end"


def test_sizes_of_which_one_way_is_replayed_are_told_once(tmp_path: Path) -> None:
    model = loaded(saved("gpt_neox", tmp_path / "model"), "float32")
    narrow = copied(model)
    runner = Runner(model, ALONE, None, narrow)
    assert isinstance(runner.graphs, RecordedSteps)
    runner.graphs._patience = 0
    runner.graphs.capture()
    sampled = tuple(dataclasses.replace(SamplingParams(), temperature=0.5, seed=row) for row in range(len(PROMPTS)))
    generate(runner, ALONE)
    generate(runner, ALONE, PROMPTS, sampled)
    assert len(set(runner.graphs.sizes)) == len(runner.graphs.sizes)
    both = [rows for rows in runner.graphs.sizes if all(runner.graphs._sizes[rows, way].proven for way in (False, True))]
    assert both, "greedy steps and others of the same number of rows"
