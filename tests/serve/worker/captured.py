"""Models whose decoding steps are captured, and what a captured step gives beside what the step itself does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serve.config import KernelsConfig
from serve.worker.batch import Batch
from serve.worker.decode_graphs import Captured
from serve.worker.loader import RankModel, Stopwatch, load_rank
from serve.worker.parallel import Ranks
from serve.worker.runner import Runner
from tests.serve.worker.family_worker import generate, settings


def load_captured(
    folder: Path, ranks: Ranks, dtype: str = "float32", *, most: int = 256, device: str | torch.device = "cpu", **model: Any
) -> RankModel:
    """This rank's part of a checkpoint, whose decoding steps can be captured; ``model`` as ``ModelConfig`` has it."""
    config, place = settings(folder, ranks.size, dtype), torch.device(device)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, device=place.type, **model),
        kernels=KernelsConfig(cuda_graphs="on", cuda_graph_max_batch=most),
    )
    return load_rank(config, ranks.rank, place, lambda: ranks, Stopwatch())[0]


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step of one token of each sequence gave for these rows."""

    rows: int
    replayed: bool
    hidden_RE: Tensor
    logits_RV: Tensor


def _following(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    steps: list[Step] = []
    compute = runner._compute

    def follow(batch: Batch) -> tuple[Tensor, Captured | None]:
        hidden_TE, captured = compute(batch)
        rows = len(batch.sampled)
        if batch.layout.query_starts[-1] == len(batch.layout.table_rows):
            own_TV = runner._model.head(hidden_TE[None])[0] if captured is None else captured.logits_TV
            steps.append(Step(rows, captured is not None, hidden_TE[:rows].clone(), own_TV[:rows].clone()))
        return hidden_TE, captured

    monkeypatch.setattr(runner, "_compute", follow)
    return steps


def tokens_of_both_ways(model: RankModel, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What is generated with captured steps; all of them give, bit for bit, what the same steps give when they are not."""
    runner = Runner(model, ranks)
    assert runner.graphs is not None
    with monkeypatch.context() as within:
        expected = _following(runner, within)
        eager = generate(runner, ranks)
    runner.graphs.capture()
    with monkeypatch.context() as within:
        found = _following(runner, within)
        replayed = generate(runner, ranks)
    assert replayed == eager
    assert {step.rows for step in found} >= {1, 2, 3}, "steps of several sizes, one with a row of no sequence"
    assert {step.replayed for step in expected} == {False}
    assert {step.replayed for step in found} == {True}
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.hidden_RE, other.hidden_RE)
        assert torch.equal(one.logits_RV, other.logits_RV)
    return replayed
