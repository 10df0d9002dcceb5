"""One rank of several that has a copy of its head from another step on than the others: ``python -m … RANK SIZE FOLDER``.

Rank 0 writes what was generated, in each turn, to FOLDER/uneven.json.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import torch

from serve.engine.plan import StepPlan, StepResult
from serve.model.narrow_head import NarrowHead
from serve.model.pace import Pace
from serve.worker.packing import Packing
from serve.worker.parallel import join_ranks
from serve.worker.progress import Progress
from serve.worker.rest import Rest
from serve.worker.runner import Runner
from tests.serve.worker.family_worker import generate, load

TURNS = 4


class Uneven(Runner):
    """One that makes its copy before a step of its rank's own."""

    steps = 0
    at = 0

    def execute(self, plan: StepPlan) -> StepResult | None:
        self.steps += 1
        if self.steps == self.at and self.narrow is not None:
            self.narrow.build(Pace(lambda _: None))
        return super().execute(plan)


def main(rank: int, size: int, root: Path) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.simplefilter("error")
    memory = os.open(root / f"memory-{size}", os.O_RDWR | os.O_CREAT)
    ranks = join_ranks(rank, size, torch.device("cpu"), root / "meeting", memory, 120.0, Progress())
    model = load(root / "model", size, ranks)
    Packing([model.filler.take_waiting()], Rest()).finish()
    narrow = NarrowHead.of(model.head, model.kernels, model.filler.num_bytes)
    assert narrow is not None, "the head is most of a small model"
    runner = Uneven(model, ranks, None, narrow)
    runner.at = 14 + 9 * rank  # of the first turn, when steps of three rows are replayed; and some steps later
    assert runner.graphs is not None
    runner.graphs.capture()
    found = [generate(runner, ranks) for _ in range(TURNS)]
    assert narrow.serves(1), "it decides enough not to be given up"
    if rank == 0:
        (root / "uneven.json").write_text(json.dumps({"tokens": found, "sizes": runner.graphs.sizes}))
    ranks.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
