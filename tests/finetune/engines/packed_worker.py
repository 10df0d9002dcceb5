"""A rank that trains on rows of several samples in each way of keeping them apart: ``python -m … FOLDER``, by ``run_ranks``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from finetune.config import (
    ActivationConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TokenizerConfig,
    TuneConfig,
    ZeroConfig,
)
from finetune.data.batches import Microbatch
from finetune.engines.zero import engine as zero
from finetune.engines.zero.engine import ZeroEngine, start_ranks
from finetune.model.build import initialise, new_config
from tests.finetune.engines.zero_worker import RANKS, SETTINGS, leave
from tests.finetune.stand_ins import CountedLiger, CountedVarlen

STEPS = 4
WAYS = ("mask", "varlen", "varlen, recomputed", "fused", "seen by all")


def batch(step: int, rank: int) -> Microbatch:
    draw = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(0, 61, (2, 17), generator=draw)
    targets = tokens[:, 1:].clone()
    targets[:, :3] = -100
    segments = torch.tensor([[0] * 5 + [1] * 7 + [2] * 4, [0] * 9 + [1] * 7])
    return Microbatch(tokens[:, :-1], targets, segments)


def losses(way: str, rank: int) -> dict[str, Any]:
    """Those of every step; what was said before, and how often what stands for a library was called."""
    varlen, liger = CountedVarlen(), CountedLiger()
    activations = ActivationConfig(
        loss="fused" if way == "fused" else "rows", checkpoint="device" if "recomputed" in way else "none"
    )
    config = TuneConfig(
        run=RunConfig(output="unused", ranks=RANKS),
        data=DataConfig(train=("unused",)),
        model=ModelConfig(new=SETTINGS),
        tokenizer=TokenizerConfig(path="unused"),
        optimizer=OptimizerConfig(lr=1e-2),
        zero=ZeroConfig(stage=3),
        activations=activations,
    )
    settings = new_config({**SETTINGS, "vocab_size": 61, "initializer_range": 0.3}, num_ids=61, seq_len=16, end_of_text_id=0)
    with (
        patch.object(zero, "is_by_length", lambda *_: "varlen" in way),
        patch.object(zero, "varlen_attention", lambda: varlen),
        patch.object(zero, "check_fused_loss"),
        patch.object(zero, "liger_loss", lambda: liger),
    ):
        engine = ZeroEngine(
            config,
            settings,
            lambda model, gather: initialise(model, gather, 5),
            device=torch.device("cpu"),
            precision="fp32",
            cpu_adam=False,
            isolated=True,
        )
    batches = [batch(step, rank) for step in range(STEPS)]
    if way == "seen by all":
        batches = [Microbatch(each.inputs, each.targets) for each in batches]
    found = [engine.train_step([each], 1e-2).loss for each in batches]
    total, count = engine.evaluate(batches[:1])
    return {
        "losses": [*found, total / count],
        "varlen": varlen.calls,
        "liger": liger.calls,
        "said": engine.describe(),
    }


def main(out: Path) -> None:
    rank = int(os.environ["RANK"])
    start_ranks("cpu", rank)
    report = {way: losses(way, rank) for way in WAYS}
    (out / f"rank-{rank}.json").write_text(json.dumps(report))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
