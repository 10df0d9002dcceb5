"""One rank that generates with captured decoding steps, and without: ``python -m … RANK SIZE FOLDER DEVICE DTYPE``.

FOLDER has a checkpoint in each of its folders. Every rank compares hidden states and logits of both ways bit for bit, and
writes, by folder, the sizes it captured in their order, what was generated both ways, greedily and by draws, and with steps one
ahead, to its graphs-RANK.json; on the CPU also what it exchanges in the graphs of each size. What a folder's name has behind
its first word says how it is loaded there: with ``layers`` of a GPU's form, ``whole`` experts on each rank, or both.
"""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from serve.config import CacheConfig
from serve.model.cuda.graphs import CpuGraph
from serve.types import SamplingParams
from serve.worker import gpus
from serve.worker.decode_graphs import DecodeGraphs
from serve.worker.parallel import Ranks, join_ranks
from serve.worker.progress import Progress
from serve.worker.rank_loop import choose_device
from serve.worker.runner import Runner
from tests.serve.worker.captured import load_captured, tokens_of_both_ways
from tests.serve.worker.family_worker import PROMPTS, generate
from tests.serve.worker.layers_of_gpu import layers_of_a_gpu
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


def prepared(wanted: str) -> torch.device:
    """This rank's device, made ready as the ranks of a server do it: before they meet, so that each meets with its own."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    device = choose_device(wanted, int(os.environ["LOCAL_RANK"]))
    gpus.take(device, CacheConfig())
    os.environ["DS_ACCELERATOR"] = device.type
    if device.type == "cpu":  # on others, libraries may say what they like
        warnings.simplefilter("error")
    return device


def compared(folder: Path, ranks: Ranks, dtype: str, device: torch.device, **model: str) -> dict[str, object]:
    """What is told of one folder; ``model`` as ``ModelConfig`` has it."""
    loaded = load_captured(folder, ranks, dtype, device=device, **model)
    assert loaded.survey.whole_experts == (model.get("experts") == "whole")
    mine: dict[str, object] = {"greedy": tokens_of_both_ways(loaded, ranks, pytest.MonkeyPatch())}
    runner = Runner(loaded, ranks)
    assert runner.graphs is not None
    mine["drawn eager"] = generate(runner, ranks, sampling=DRAWN)
    runner.graphs.capture()
    mine["drawn"] = generate(runner, ranks, sampling=DRAWN)
    for name, sampling in (
        ("greedy ahead", ()),
        ("drawn ahead", DRAWN),
        ("drawn without penalties ahead", (DRAWN[0],) * 3),
    ):
        mine[name], followed = generated_ahead(runner, ranks, sampling)
        assert followed > 0
    mine["drawn without penalties"] = generate(runner, ranks, sampling=(DRAWN[0],) * 3)
    return mine | {"sizes": runner.graphs.sizes, "exchanged": exchanged(runner.graphs) if device.type == "cpu" else []}


def main(rank: int, size: int, root: Path, wanted: str, dtype: str) -> None:
    device = prepared(wanted)
    memory = os.open(root / f"memory-{size}", os.O_RDWR | os.O_CREAT)
    ranks = join_ranks(rank, size, device, root / f"meeting-{size}", memory, 120.0, Progress())
    told = dict[str, dict[str, object]]()
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        _, *how = folder.name.split()
        with layers_of_a_gpu() if "layers" in how else nullcontext({}) as kernels:
            model = {"experts": "whole"} if "whole" in how else {}
            told[folder.name] = compared(folder, ranks, dtype, device, **model)
        assert ("layers" in how) == any(kernel.launches for kernel in kernels.values())
    (root / f"graphs-{rank}.json").write_text(json.dumps(told))
    os._exit(0)  # as ranks end: NCCL would wait for the graphs that hold its exchanges


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
