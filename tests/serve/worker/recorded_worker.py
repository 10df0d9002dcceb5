"""One rank of several that decodes with recorded steps, and without: ``python -m … RANK SIZE FOLDER``.

FOLDER has a checkpoint in each of its folders; where a name ends with int8, weights are rounded. Every rank writes, by folder
and type, what steps gave both ways and which were replayed, to its recorded-RANK.json.
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
from tests.serve.worker.recorded import digests_of_both_ways, load_recorded


def main(rank: int, size: int, root: Path) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.simplefilter("error")
    memory = os.open(root / f"memory-{size}", os.O_RDWR | os.O_CREAT)
    ranks = join_ranks(rank, size, torch.device("cpu"), root / f"meeting-{size}", memory, 120.0, Progress())
    told = {
        f"{folder.name} {dtype}": digests_of_both_ways(
            load_recorded(folder, ranks, dtype, quantization="int8" if folder.name.endswith("int8") else "none"), ranks
        )
        for folder in sorted(path for path in root.iterdir() if path.is_dir())
        for dtype in ("float32", "bfloat16")
    }
    (root / f"recorded-{rank}.json").write_text(json.dumps(told))
    ranks.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
