"""Recorded decoding steps give the bits of the same steps computed by Python, in every family, and are given up where not."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpoint import open_checkpoint
from serve.model.families import FAMILIES
from serve.worker.loader import survey
from serve.worker.parallel import Ranks
from serve.worker.rank_process import rank_environment
from serve.worker.recorded_steps import RecordedSteps
from tests.serve.worker.family_worker import settings
from tests.serve.worker.recorded import ROWS, STEPS, Following, digests_of_both_ways, load_recorded
from tests.serve.worker.test_loader import VARIANTS
from tests.support import warm
from tests.support.models import save

pytestmark = pytest.mark.usefixtures("one_thread_of_kernels")

ALONE = Ranks(0, 1)
FEW_ROWS = (1, 2, 7)
"""Where threads wait for one another, which takes long on cores that are taken."""
BY_PYTHON = {"llama, dynamic angles"}
"""Whose angles come from the host in every step."""
CASES = [name if name in FAMILIES else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name not in BY_PYTHON]


def saved(name: str, folder: Path, **more: Any) -> Path:
    family, changes = VARIANTS[name]
    return save(family, folder, with_tokenizer=False, **changes, **more)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_a_replayed_step_gives_what_the_step_gives_bit_for_bit(name: str, dtype: str, tmp_path: Path) -> None:
    model = load_recorded(saved(name, tmp_path / "model"), ALONE, dtype)
    eager, replayed, sizes, _ = digests_of_both_ways(model, ALONE)
    assert len(eager) >= len(ROWS) * STEPS
    assert replayed == eager
    assert sizes == ROWS


@pytest.mark.parametrize(("family", "bits"), [("llama", "int8"), ("llama", "int4"), ("mixtral", "int8")])
def test_so_do_steps_of_quantized_weights_on_two_threads(family: str, bits: str, tmp_path: Path) -> None:
    model = load_recorded(saved(family, tmp_path / "model"), ALONE, "bfloat16", quantization=bits)
    torch.set_num_threads(2)
    eager, replayed, sizes, _ = digests_of_both_ways(model, ALONE, FEW_ROWS)
    assert replayed == eager
    assert sizes == FEW_ROWS


@pytest.mark.parametrize("name", ["gpt_neox", "llama", "qwen2", "mistral"])
def test_between_two_layers_of_the_common_families_python_has_no_part(name: str, tmp_path: Path) -> None:
    parts = []
    for layers in (2, 3):
        model = load_recorded(saved(name, tmp_path / str(layers), num_hidden_layers=layers), ALONE, "bfloat16")
        each = Following(model, ALONE, replays=True)
        each.decode(2)
        graphs = each.runner.graphs
        assert isinstance(graphs, RecordedSteps)
        program = graphs._sizes[2, True].program
        assert program is not None
        parts.append(program.parts)
    assert parts[0] == parts[1]


def test_two_ranks_replay_what_they_exchange(tmp_path: Path) -> None:
    for name in ("gpt_neox", "gpt2", "olmo2"):
        saved(name, tmp_path / name)
    for layers in (2, 3):
        saved("llama", tmp_path / f"llama of {layers} layers", num_hidden_layers=layers)
    saved("mixtral", tmp_path / "mixtral of int8")
    ranks = [
        warm.start("tests.serve.worker.recorded_worker", [str(rank), "2", str(tmp_path)], rank_environment(rank, 2, "cpu"))
        for rank in range(2)
    ]
    said = warm.all_ended(ranks, 600.0)
    assert [rank.returncode for rank in ranks] == [0, 0], said
    for rank in range(2):
        told = json.loads((tmp_path / f"recorded-{rank}.json").read_text())
        assert len(told) == 12
        for eager, replayed, sizes, _ in told.values():
            assert replayed == eager
            assert sizes == list(ROWS)
        for dtype in ("float32", "bfloat16"):
            *_, of_two = told[f"llama of 2 layers {dtype}"]
            *_, of_three = told[f"llama of 3 layers {dtype}"]
            assert of_two == of_three, "Python has no part between layers, nor in what ranks add up"


def test_after_other_weights_were_taken_steps_are_recorded_anew(tmp_path: Path) -> None:
    model = load_recorded(saved("llama", tmp_path / "old"), ALONE, "float32")
    replaying = Following(model, ALONE, replays=True)
    replaying.decode(2)
    graphs = replaying.runner.graphs
    assert isinstance(graphs, RecordedSteps)
    assert graphs.sizes == (2,)
    graphs.forget()
    assert graphs.sizes == ()
    other = saved("llama", tmp_path / "new", seed=5)
    with open_checkpoint(other) as checkpoint:
        found = survey(checkpoint, settings(other, 1, "float32"), model.device)
        for value in model.filler.read(checkpoint, found.blueprint):
            value.put()
    graphs.capture()
    before = len(replaying.digests)
    replaying.decode(2)
    assert graphs.sizes == (2,)
    expected = Following(load_recorded(other, ALONE, "float32"), ALONE, replays=False)
    expected.decode(2)
    assert replaying.digests[before:] == expected.digests


def test_steps_are_left_to_replayed_layers_until_there_were_some_of_as_many_rows(tmp_path: Path) -> None:
    model = load_recorded(saved("llama", tmp_path / "model"), ALONE, "bfloat16")
    patience = STEPS + 2
    eager, replaying = Following(model, ALONE, replays=False), Following(model, ALONE, replays=True, patience=patience)
    graphs = replaying.runner.graphs
    assert isinstance(graphs, RecordedSteps)
    assert graphs._layers is not None
    for each in (eager, replaying):
        for rows in (2, 4, 6):  # prompts of several lengths, by which layers are replayed for any number of tokens
            each.decode(rows)
    assert graphs._layers.replays
    recorded = set(graphs.sizes)
    for rows, more in (
        (5, set()),
        (1, {1}),
        (5, {1, 5}),
    ):  # one row alone, which layers are not replayed for, is recorded at once
        eager.decode(rows)
        replaying.decode(rows)
        assert set(graphs.sizes) - recorded == more
    assert replaying.digests == eager.digests


class _Head(nn.Module):
    """A head with something more behind it."""

    def __init__(self, head: nn.Module, more: Any) -> None:
        super().__init__()
        self.head, self.more = head, more

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.more(self.head(hidden))
        return logits


def counting() -> Any:
    calls = [0]

    def more(logits: Tensor) -> Tensor:
        calls[0] += 1
        return logits + calls[0]

    return more


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (lambda logits: logits * float(logits.amax().item() < 1e9), "cannot be recorded: .*needs numbers of the host"),
        (lambda logits: logits + torch.tensor([0.5]), "cannot be recorded"),
        (counting(), "a replay gave other numbers"),
    ],
    ids=["waits for a number", "has numbers of the host", "is another each time"],
)
def test_a_step_that_no_replay_would_give_is_told_of_once_and_computed_by_python(
    more: Any, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_recorded(saved("gpt_neox", tmp_path / "model"), ALONE, "float32")
    model = dataclasses.replace(model, head=_Head(model.head, more))
    following = Following(model, ALONE, replays=True)
    with caplog.at_level(logging.WARNING, "serve.worker.recorded_steps"):
        following.decode(2)
        following.decode(3)
    graphs = following.runner.graphs
    assert isinstance(graphs, RecordedSteps)
    assert graphs.sizes == ()
    assert len(caplog.messages) == 1
    assert re.search(why, caplog.messages[0])
