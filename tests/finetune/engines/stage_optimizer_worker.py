"""One of the ranks that train stages without AdamW: ``python -m tests.finetune.engines.stage_optimizer_worker OUT``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import groups
from torch import nn

import finetune.engines.pipeline.assignment
from checkpoint import open_checkpoint
from finetune.config import OptimizerConfig
from finetune.engines.protocol import TrainingEngine
from finetune.engines.zero.engine import ZeroEngine, start_ranks
from finetune.model.build import build_empty, decay_groups, initialise
from finetune.optimizers.algorithms.lion import Lion
from finetune.train.position import RunPosition
from finetune.train.resume import ResumeState
from tests.finetune.engines.pipelines import (
    costly_head,
    hf_config,
    keeper,
    make_engine,
    mine,
    run_config,
    step_data,
)
from tests.finetune.engines.zero_worker import fp16_on_cpu, leave, same, snapshot, whole
from tests.finetune.optimizers.optimizer_worker import still_keys, torch_optimizers, train_plainly

SAVED, STEPS = 4, 8
ELSEWHERE = 2
"""Steps that a run goes on for without a pipeline: the first shows its weights, the second what its state makes of them."""
OPTIMIZERS = {
    "lion": OptimizerConfig(name="lion", lr=3e-4, weight_decay=0.1, clip=0.5),
    "muon": OptimizerConfig(name="muon", lr=3e-3, weight_decay=0.1, clip=0.5),
    "adafactor": OptimizerConfig(name="adafactor", lr=3e-3, weight_decay=0.1, clip=0.5),
}
CASES = {
    2: {
        "zero0": (0, "fp32", "uniform"),
        "zero1": (1, "fp32", "uniform"),
        "zero1-bf16": (1, "bf16", "uniform"),
        "zero0-fp16": (0, "fp16", "uniform"),
        # All weights are the first stage's: the second has copies, and nothing of its own to update.
        "head-in-pieces": (1, "fp32", "profile"),
    },
    4: {
        "zero1": (1, "fp32", "uniform"),
        "head-in-pieces": (1, "bf16", "profile"),
        "head-in-pieces-zero0": (0, "fp32", "profile"),
    },
}
"""By ranks: ZeRO stage, precision, partition into two stages."""


def cases_of(name: str, ranks: int) -> list[str]:
    """What is tried with an optimizer; Lion, which looks at one element after the other, is alike on all ranks."""
    return ["zero1"] if name == "lion" and ranks == 4 else list(CASES[ranks])


def fill(model: nn.Module, gather: Any) -> None:
    initialise(model, gather, 5)  # type: ignore[arg-type]
    still_keys(model)


def reference(name: str) -> list[float]:
    """Losses of every step on the whole batch, by plain PyTorch in one process."""
    options = OPTIMIZERS[name]
    model = build_empty(hf_config("gpt2"), torch.float32, nullcontext())
    fill(model, whole)
    if name == "lion":
        betas = (options.betas[0], options.betas[1])
        optimizers: list[torch.optim.Optimizer] = [Lion(decay_groups(model, options.weight_decay), lr=options.lr, betas=betas)]
    else:
        optimizers = torch_optimizers(options, model)
    return train_plainly(model, optimizers, options, [(step_data(step), options.lr) for step in range(STEPS)])


def train(engine: TrainingEngine, options: OptimizerConfig, steps: range) -> list[float]:
    return [engine.train_step(mine(engine, step), options.lr).loss for step in steps]


def trained(name: str, case: str, output: Path) -> dict[str, Any]:
    """Losses of all steps, with a save on the way; of those after it again, resumed there and without a pipeline."""
    options = OPTIMIZERS[name]
    zero, precision, partition = CASES[int(os.environ["WORLD_SIZE"])][case]

    def staged(fill: Callable[..., None]) -> TrainingEngine:
        return make_engine("gpt2", zero=zero, precision=precision, optimizer=options, fill=fill, partition=partition)

    def alone(fill: Callable[..., None]) -> TrainingEngine:
        groups.mpu = None  # DeepSpeed remembers the last pipeline's ranks
        config, settings = run_config("gpt2", 1, 3, optimizer=options), hf_config("gpt2")
        with fp16_on_cpu():
            return ZeroEngine(config, settings, fill, device=torch.device("cpu"), precision=precision, cpu_adam=False)

    def restored(make: Callable[[Callable[..., None]], TrainingEngine]) -> TrainingEngine:
        state = ResumeState(open_checkpoint(output / "resume"))

        def filled(model: Any, gather: Any) -> None:
            state.fill(model, gather)
            still_keys(model)

        engine = make(filled)
        state.restore(engine)
        return engine

    engine = staged(fill)
    losses = train(engine, options, range(SAVED))
    position = RunPosition(step=SAVED, samples=0, tokens=0, optimizer_steps=engine.optimizer_steps, skipped_in_a_row=0)
    keeper(output, "gpt2").save(engine, position)
    losses += train(engine, options, range(SAVED, STEPS))
    again = restored(staged)
    resumed = train(again, options, range(SAVED, STEPS))
    return {
        "losses": losses,
        "resumed": resumed,
        "bitwise": same(snapshot(engine), snapshot(again)) and again.optimizer_steps == engine.optimizer_steps == STEPS,
        "without a pipeline": train(restored(alone), options, range(SAVED, SAVED + ELSEWHERE)),
    }


def main(out: Path) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start_ranks("cpu", rank)
    finetune.engines.pipeline.assignment.measure = costly_head  # type: ignore[assignment]
    report: dict[str, Any] = {}
    for name in OPTIMIZERS:
        seen = {case: trained(name, case, out / f"{name}-{case}") for case in cases_of(name, ranks)}
        report[name] = {"reference": reference(name), **seen}
    (out / f"rank-{rank}.json").write_text(json.dumps(report))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
