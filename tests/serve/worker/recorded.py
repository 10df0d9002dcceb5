"""Decoding steps that are recorded and replayed, beside the same steps computed by Python each time."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch

from serve.engine.plan import Span, Start, StepPlan
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker.batch import Batch
from serve.worker.loader import RankModel, Stopwatch, load_rank
from serve.worker.parallel import Ranks
from serve.worker.recorded_steps import RecordedSteps
from serve.worker.runner import Runner
from tests.serve.worker.family_worker import BLOCK_TOKENS, settings

ROWS = tuple(range(1, 9))
STEPS = 6
"""Of each number of rows: three until it is replayed, and three replays."""
_BLOCKS = 4


def load_recorded(folder: Path, ranks: Ranks, dtype: str, **model: Any) -> RankModel:
    """This rank's part of a checkpoint, with up to 8 sequences at once."""
    config = settings(folder, ranks.size, dtype)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **model),
        cache=dataclasses.replace(config.cache, kv_cache_gib=0.02),
        scheduler=dataclasses.replace(config.scheduler, max_num_seqs=ROWS[-1]),
    )
    return load_rank(config, ranks.number, torch.device("cpu"), lambda: ranks, Stopwatch())[0]


class Following:
    """A runner of whose steps of one token each is kept what they gave."""

    def __init__(self, model: RankModel, ranks: Ranks, *, replays: bool, patience: int = 0) -> None:
        """``patience``: how many steps of each number of rows are left to replayed layers, before one is recorded."""
        self.runner = Runner(model, ranks)
        self.digests: list[str] = []
        """Of the bits of each step's last hidden states and logits."""
        if replays:
            assert isinstance(self.runner.graphs, RecordedSteps)
            self.runner.graphs._patience = patience
            self.runner.graphs.capture()
        self._step = 0
        self._compute = self.runner._compute
        self.runner._compute = self._follow  # type: ignore[method-assign]  # what a step gave is seen nowhere else

    def _follow(self, batch: Batch) -> tuple[torch.Tensor, Any]:
        hidden_TE, replayed = self._compute(batch)
        if batch.layout.query_starts[-1] == len(batch.layout.table_rows):
            own_TV = None if replayed is None else replayed.logits_TV
            if own_TV is None:
                own_TV = self.runner._model.head(hidden_TE[None])[0].float()
            numbers = torch.cat((hidden_TE.float().flatten(), own_TV.flatten()))
            self.digests.append(hashlib.sha256(numbers.numpy().tobytes()).hexdigest())
        return hidden_TE, replayed

    def decode(self, rows: int) -> None:
        """Start so many sequences, compute ``STEPS`` tokens of each, and forget them."""
        starts, first, position = [], [], []
        for i in range(rows):
            ids = tuple((7 * place * place + 31 * i) % 500 + 1 for place in range(4 + 5 * i))
            blocks = tuple(BlockId(_BLOCKS * i + block) for block in range(_BLOCKS))
            starts.append(
                Start(sequence=SequenceId(i), index=0, token_ids=ids, num_prompt_tokens=len(ids), sampling=SamplingParams())
            )
            first.append(Span(sequence=SequenceId(i), start=0, count=len(ids), new_blocks=blocks, sample=True))
            position.append(len(ids))
        assert max(position) + STEPS <= _BLOCKS * BLOCK_TOKENS
        self._execute(starts=tuple(starts), spans=tuple(first))
        for step in range(STEPS):
            spans = tuple(
                Span(sequence=SequenceId(i), start=position[i] + step, count=1, continues=True, sample=True)
                for i in range(rows)
            )
            self._execute(spans=spans)
        self._execute(dropped=tuple(SequenceId(i) for i in range(rows)))

    def _execute(self, **parts: Any) -> None:
        self._step += 1
        self.runner.execute(StepPlan(step=self._step, **parts))


def most_parts(graphs: RecordedSteps) -> int:
    """How often Python has a part in a replay at the most."""
    return max(size.program.parts for size in graphs._sizes.values() if size.program is not None)


def digests_of_both_ways(
    model: RankModel, ranks: Ranks, sizes: tuple[int, ...] = ROWS
) -> tuple[list[str], list[str], tuple[int, ...], int]:
    """What steps of these numbers of rows gave by Python, what they gave with replays, and which of them were replayed.

    Last, how often Python has a part in these.
    """
    eager, replayed = (Following(model, ranks, replays=replays) for replays in (False, True))
    for each in (eager, replayed):
        for rows in sizes:
            each.decode(rows)
    assert isinstance(replayed.runner.graphs, RecordedSteps)
    graphs = replayed.runner.graphs
    return eager.digests, replayed.digests, graphs.sizes, most_parts(graphs)
