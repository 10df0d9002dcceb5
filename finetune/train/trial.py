"""Times steps of small runs as one of the ranks, for ``finetune.forecast.measure``. Run as a process of its own."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from finetune.config import TuneConfig
from finetune.forecast.trials import Job, trials_of
from finetune.machine.process import die_with_parent, without_collection
from host.process import end_process

if TYPE_CHECKING:
    from finetune.engines.protocol import TrainingEngine

_STEPS: Final = 6
"""Timed, of each trial; one before them is not."""


def main(job: Job) -> None:
    """Print the figures of rank 0 as one JSON object: ``speeds``, and ``seconds`` of a step of each trial."""
    die_with_parent(int(os.environ["TESSERA_PARENT"]))
    os.environ["DS_ACCELERATOR"] = "cpu"
    with without_collection():
        import torch

        from finetune.engines.zero.engine import start_ranks
        from finetune.forecast.probe import measure
        from finetune.machine import build_ops
        from finetune.model.dtypes import DTYPES

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    start_ranks("cpu", int(os.environ["RANK"]))
    build_ops.load_all(job.libraries, device="cpu")
    speeds = measure(DTYPES[job.precision], job.config.run.ranks)
    seconds = [_seconds(trial, job) for trial in trials_of(job.config)]
    print(json.dumps({"speeds": speeds, "seconds": seconds}), flush=True)


def _seconds(config: TuneConfig, job: Job) -> float:
    """Median of a few steps of a run."""
    import torch
    from torch import distributed

    from finetune.data.batches import Microbatch

    assert config.model.new is not None, "a trial's model is new"
    engine = _engine(config, job)
    shape = (config.batch.micro, config.data.seq_len)
    ids = torch.arange(shape[0] * shape[1]).view(shape) % config.model.new["vocab_size"]
    batches = [Microbatch(ids, ids) for _ in range(config.accumulation)]
    taken = []
    for _ in range(1 + _STEPS):
        distributed.barrier()
        began = time.perf_counter()
        engine.train_step(batches, 1e-6)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def _engine(config: TuneConfig, job: Job) -> TrainingEngine:
    import torch

    from finetune.model.build import initialise, new_config

    hf_config = new_config(config.model.new or {}, num_ids=512, seq_len=config.data.seq_len, end_of_text_id=0)
    common: dict[str, Any] = {"device": torch.device("cpu"), "precision": job.precision}

    def fill(model: Any, gather: Any) -> None:
        initialise(model, gather, 0)

    if job.command == "pretrain":
        from finetune.engines.pipeline.engine import PipelineEngine

        return PipelineEngine(config, hf_config, fill, **common)
    from finetune.engines.zero.engine import ZeroEngine

    return ZeroEngine(config, hf_config, fill, cpu_adam="cpu_adam" in job.libraries, **common)


if __name__ == "__main__":
    main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job))
    end_process(0)
