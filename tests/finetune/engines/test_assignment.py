"""Which layers go to which stage: every layer to one stage, in order, however they are cut; and what a measurement decides."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from finetune.config import (
    ActivationConfig,
    BatchConfig,
    DataConfig,
    ModelConfig,
    PipelineConfig,
    RunConfig,
    TokenizerConfig,
    TuneConfig,
)
from finetune.engines.pipeline import assignment
from finetune.engines.pipeline.assignment import PROFILE, StageAssignment, assign_stages
from finetune.engines.pipeline.layer_costs import recall, remember
from finetune.engines.pipeline.layers import Layer, LossTally, build_on_meta, num_parameters, split
from finetune.engines.pipeline.partition import uniform
from finetune.errors import ConfigError
from finetune.model.build import new_config

CPU = torch.device("cpu")
NEW = {"model_type": "gpt2", "n_embd": 32, "n_layer": 6, "n_head": 4, "vocab_size": 61}
MODEL = build_on_meta(new_config(NEW, num_ids=61, seq_len=8, end_of_text_id=0), torch.float32)


def layers(pieces: int = 1) -> list[Layer]:
    return split(MODEL, CPU, LossTally(CPU), ActivationConfig(), head_pieces=pieces)


def tune(output: Path, stages: int, partition: str, **run: Any) -> TuneConfig:
    return TuneConfig(
        run=RunConfig(output=str(output), ranks=stages, **run),
        data=DataConfig(train=("x",), seq_len=8),
        model=ModelConfig(new=NEW),
        tokenizer=TokenizerConfig(path="x"),
        batch=BatchConfig(micro=2),
        pipeline=PipelineConfig(stages=stages, partition=partition),
    )


def assert_whole(made: StageAssignment) -> None:
    """Every layer is on one stage, in order, and no stage is empty."""
    assert [layer for stage in range(made.stages) for layer in made.of(stage)] == list(made.layers)
    assert all(start < stop for start, stop in pairwise(made.bounds))


@pytest.mark.parametrize("partition", ["parameters", "uniform", "type:GPT2Block"])
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_every_layer_is_on_one_stage(tmp_path: Path, partition: str, stages: int) -> None:
    made = assign_stages(tune(tmp_path, stages, partition), MODEL, layers, CPU)
    assert made.stages == stages
    assert made.costs is None
    assert_whole(made)
    kinds = [layer.kind for layer in made.layers]
    assert kinds == ["embedding", *["block"] * 6, "norm", "head"]
    if partition == "uniform":
        assert made.bounds == uniform(9, stages)
    if partition.startswith("type"):
        blocks = [sum(layer.kind == "block" for layer in made.of(stage)) for stage in range(stages)]
        assert max(blocks) - min(blocks) <= 1
    sizes = [num_parameters(*made.of(stage)) for stage in range(stages)]
    if partition == "parameters" and stages == 2:
        assert max(sizes) <= sum(sizes) / 2 + max(num_parameters(layer) for layer in made.layers)


@pytest.mark.parametrize("partition", ["parameters", "uniform", "type:GPT2Block", "profile"])
def test_more_stages_than_layers_are_refused_with_how_many_there_are(
    tmp_path: Path, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assignment, "_measure", lambda some, *_: [1.0] * len(some))
    rule = r"pipeline\.stages is 30; it must be at most \d+, the layers of this model that can be apart"
    with pytest.raises(ConfigError, match=rule):
        assign_stages(tune(tmp_path, 30, partition), MODEL, layers, CPU)
    assert assign_stages(tune(tmp_path, 9, "uniform"), MODEL, layers, CPU).stages == 9, "as many as there are do"


@pytest.mark.parametrize("seed", range(8))
def test_a_weight_is_owned_by_the_first_stage_that_computes_with_it(seed: int) -> None:
    draw = random.Random(seed)
    cut = sorted(draw.sample(range(1, 9), draw.randint(1, 5)))
    made = StageAssignment(layers(), (0, *cut, 9))
    assert_whole(made)
    users = made.users()
    assert set(users) == set(nn.ModuleList(made.layers).parameters())
    for parameter, stages in users.items():
        assert stages == [
            stage for stage in range(made.stages) if any(parameter is p for layer in made.of(stage) for p in layer.parameters())
        ]
    table = made.layers[0].tokens.weight  # type: ignore[union-attr]  # the embedding, which GPT-2's head shares
    assert users[table] == [0, made.stages - 1]
    assert [len(stages) for parameter, stages in users.items() if parameter is not table] == [1] * (len(users) - 1)


def test_stages_are_described_by_what_they_hold_and_how_long_they_wait() -> None:
    made = StageAssignment(layers(2), (0, 4, 9, 10), [0.001, *[0.002] * 6, 0.001, 0.004, 0.004])
    first, second, third, last = made.describe(6)
    assert first.startswith("stage 0: embedding, 3 transformer blocks; ")
    assert second.startswith("stage 1: 3 transformer blocks, norm, 1/2 of the head; ")
    assert third == f"stage 2: 1/2 of the head; {num_parameters(made.layers[-1]):,} parameters; 4.0 ms"
    assert first.endswith(" parameters; 7.0 ms")
    assert last == "slowest stage: 1.50 x the mean; a step of 6 micro-batches waits 25% of its time"
    plain = StageAssignment(layers(), (0, 2, 9)).describe(6)
    assert len(plain) == 2
    assert plain[0].startswith("stage 0: embedding, 1 transformer block; ")
    assert " ms" not in "".join(plain), "what was not measured is not told"
    assert len(StageAssignment(layers(), (0, 9), [1.0] * 9).describe(6)) == 1, "one stage waits for nobody"


# -- measured


@dataclass
class Ranks:
    """Collectives of two ranks of which this one is a given one; the other measures as much again."""

    rank: int = 0
    others: float = 3.0
    """What the other rank measures, in terms of this one's."""

    def install(self, monkeypatch: pytest.MonkeyPatch, sent: list[float] | None = None) -> None:
        def broadcast(tensor: torch.Tensor, src: int) -> None:
            if self.rank != src and sent is not None:
                tensor.copy_(torch.tensor(sent, dtype=tensor.dtype))

        monkeypatch.setattr(assignment.dist, "get_rank", lambda: self.rank)
        monkeypatch.setattr(assignment.dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(assignment.dist, "broadcast", broadcast)
        monkeypatch.setattr(assignment.dist, "all_reduce", lambda tensor: tensor.mul_(1 + self.others))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The layers of each measurement, as their kinds: a block takes 2 s, a head 60 s over its pieces, all else nothing much."""
    asked: list[list[str]] = []

    def measure(some: Sequence[Layer], **_: Any) -> list[float]:
        asked.append([layer.kind for layer in some])
        return [{"block": 2.0, "head": 60.0 / getattr(layer, "_pieces", 1)}.get(layer.kind, 0.1) for layer in some]

    monkeypatch.setattr(assignment, "measure", measure)
    return asked


def test_what_all_ranks_measured_is_averaged_and_kept_for_the_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[list[str]]
) -> None:
    Ranks().install(monkeypatch)
    made = assign_stages(tune(tmp_path, 2, "profile"), MODEL, layers, CPU)
    assert_whole(made)
    assert made.costs is not None
    pieces = sum(layer.kind == "head" for layer in made.layers)
    assert pieces > 1, "a head that costs more than all blocks is cut"
    assert made.costs[1] == pytest.approx((2.0 + 6.0) / 2)
    assert sum(made.costs) == pytest.approx(2 * (6 * 2.0 + 0.2 + 60.0))
    assert measured[0] == [layer.kind for layer in layers()]
    count = len(measured)
    again = assign_stages(tune(tmp_path, 2, "profile", resume="auto"), MODEL, layers, CPU)
    assert (again.bounds, again.costs) == (made.bounds, made.costs)
    assert len(measured) == count, "a run that goes on has the stages it had"
    fresh = assign_stages(tune(tmp_path, 2, "profile"), MODEL, layers, CPU)
    assert len(measured) > count, "one that starts anew measures anew"
    assert fresh.bounds == made.bounds
    longer = tune(tmp_path, 2, "profile", resume="auto")
    object.__setattr__(longer.data, "seq_len", 4)
    count = len(measured)
    assign_stages(longer, MODEL, layers, CPU)
    assert len(measured) > count, "another length is another measurement"


def test_a_rank_takes_what_the_first_one_remembers_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[list[str]]
) -> None:
    Ranks(rank=1).install(monkeypatch, sent=[0.1, *[1.0] * 6, 0.1, 2.0])
    made = assign_stages(tune(tmp_path, 2, "profile", resume="auto"), MODEL, layers, CPU)
    assert made.costs == pytest.approx([0.1, *[1.0] * 6, 0.1, 2.0])
    assert measured == []
    Ranks(rank=1).install(monkeypatch)
    assign_stages(tune(tmp_path, 2, "profile"), MODEL, layers, CPU)
    assert measured
    assert not (tmp_path / PROFILE).exists()


def test_a_measurement_is_kept_under_its_conditions_and_damage_is_no_measurement(tmp_path: Path) -> None:
    file = tmp_path / PROFILE
    remember(file, {"micro": 2, "layers": ["a"]}, [1.0])
    remember(file, {"micro": 4, "layers": ["a"]}, [2.0])
    remember(file, {"micro": 2, "layers": ["a"]}, [3.0])
    assert recall(file, {"layers": ["a"], "micro": 2}) == [3.0], "the newest of the same conditions, in any order of keys"
    assert recall(file, {"micro": 4, "layers": ["a"]}) == [2.0]
    assert recall(file, {"micro": 4, "layers": ["a", "b"]}) is None
    assert len(json.loads(file.read_text())) == 2
    assert [path.name for path in tmp_path.iterdir()] == [PROFILE]
    for damaged in ("", "{", "[1]", '{"conditions": 1}', '[{"conditions": {"micro": 4}}]', "null", "\xff"):
        file.write_text(damaged, encoding="latin-1")
        assert recall(file, {"micro": 4}) is None
        remember(file, {"micro": 4}, [5.0])
        assert recall(file, {"micro": 4}) == [5.0], "and the next one is kept"
