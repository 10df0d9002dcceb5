"""One rank that generates with captured decoding steps, and without: ``python -m … RANK SIZE FOLDER``.

FOLDER has a checkpoint in each of its folders. Every rank writes, by folder, the sizes it captured in their order and what was
generated both ways, to its graphs-RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import torch

from serve.worker.parallel import join_ranks
from serve.worker.progress import Progress
from serve.worker.runner import Runner
from tests.serve.worker.captured import load_captured
from tests.serve.worker.family_worker import generate


def main(rank: int, size: int, root: Path) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.simplefilter("error")
    memory = os.open(root / f"memory-{size}", os.O_RDWR | os.O_CREAT)
    ranks = join_ranks(rank, size, torch.device("cpu"), root / f"meeting-{size}", memory, 120.0, Progress())
    told = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        runner = Runner(load_captured(folder, ranks), ranks)
        assert runner.graphs is not None
        eager = generate(runner, ranks)
        runner.graphs.capture()
        told[folder.name] = {"eager": eager, "sizes": runner.graphs.sizes, "replayed": generate(runner, ranks)}
    (root / f"graphs-{rank}.json").write_text(json.dumps(told))
    ranks.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
