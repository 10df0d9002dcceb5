"""One rank that generates with captured decoding steps, and without: ``python -m … RANK SIZE FOLDER``.

FOLDER has a checkpoint in each of its folders. Every rank writes, by folder, the sizes it captured in their order, what it
exchanges in the graphs of each size, and what was generated both ways, greedily and by draws, to its graphs-RANK.json; and what
is generated with steps one ahead.
"""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from serve.model.cuda.graphs import CpuGraph
from serve.types import SamplingParams
from serve.worker.decode_graphs import DecodeGraphs
from serve.worker.parallel import Ranks, join_ranks
from serve.worker.progress import Progress
from serve.worker.runner import Runner
from tests.serve.worker.captured import load_captured
from tests.serve.worker.family_worker import PROMPTS, generate
from tests.serve.worker.steps_ahead import one_ahead, plans

DRAWN = (
    SamplingParams(temperature=1.0, top_k=50, seed=1),
    SamplingParams(temperature=1.3, typical_p=0.9, presence_penalty=0.5, seed=2),
    SamplingParams(),
)


def exchanged(graphs: DecodeGraphs) -> list[list[list[tuple[str, tuple[int, ...]]]]]:
    """What the graphs of each size exchange, in their order: the operation, and the shape that this rank brings."""

    def brought(arguments: object) -> tuple[int, ...]:
        return tuple([leaf.shape for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)][-1])

    def of(graph: CpuGraph) -> list[tuple[str, tuple[int, ...]]]:
        return [(str(call), brought(given)) for call, given, _, _ in graph._operations if call.namespace == "c10d"]

    sizes = graphs._captured.values()
    return [[of(cast(CpuGraph, each.graph)), of(cast(CpuGraph, each.gathering))] for each in sizes]


def generated_ahead(runner: Runner, ranks: Ranks, sampling: tuple[SamplingParams, ...]) -> tuple[list[list[int]], int]:
    """Continuations as ``generate`` gives them, and how many plans were launched here with another one under way."""
    results, followed = one_ahead(runner, plans(sampling), random.Random(ranks.rank))  # each rank settles when it pleases
    said = [(each.sequence, each.token_id) for result in results if result is not None for each in result.sampled]
    got: list[list[int]] = [[] for _ in PROMPTS]
    for sequence, token in json.loads(ranks.told_by_first(json.dumps(said))):
        got[sequence].append(token)
    return got, followed


def main(rank: int, size: int, root: Path) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.simplefilter("error")
    memory = os.open(root / f"memory-{size}", os.O_RDWR | os.O_CREAT)
    ranks = join_ranks(rank, size, torch.device("cpu"), root / f"meeting-{size}", memory, 120.0, Progress())
    told = dict[str, dict[str, object]]()
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        runner = Runner(load_captured(folder, ranks), ranks)
        assert runner.graphs is not None
        mine: dict[str, object] = {"eager": generate(runner, ranks), "drawn eager": generate(runner, ranks, sampling=DRAWN)}
        told[folder.name] = mine
        runner.graphs.capture()
        mine |= {"replayed": generate(runner, ranks), "drawn": generate(runner, ranks, sampling=DRAWN)}
        for name, sampling in (("ahead", ()), ("drawn ahead", DRAWN), ("drawn without penalties ahead", (DRAWN[0],) * 3)):
            mine[name], followed = generated_ahead(runner, ranks, sampling)
            assert followed > 0
        mine["drawn without penalties"] = generate(runner, ranks, sampling=(DRAWN[0],) * 3)
        mine |= {"sizes": runner.graphs.sizes, "exchanged": exchanged(runner.graphs)}
    (root / f"graphs-{rank}.json").write_text(json.dumps(told))
    ranks.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
