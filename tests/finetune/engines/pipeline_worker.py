"""One of several ranks that drive the pipeline engine directly: ``python -m tests.finetune.engines.pipeline_worker OUT``.

Starting ranks is what takes time, so one set of them goes through all cases and writes what it saw to OUT.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from transformers import AutoModelForCausalLM, PreTrainedModel

import finetune.engines.pipeline.assignment
from checkpoint import open_checkpoint
from finetune.config import (
    ActivationConfig,
)
from finetune.data.batches import Microbatch
from finetune.engines.pipeline.engine import PipelineEngine
from finetune.engines.pipeline.layers import num_parameters
from finetune.engines.protocol import TrainingEngine
from finetune.engines.zero.engine import ZeroEngine, start_ranks
from finetune.model.build import build_empty, fill, initialise
from finetune.model.loss import token_losses
from finetune.train.position import RunPosition
from finetune.train.resume import ResumeState
from tests.finetune.engines.pipelines import (
    MICROBATCHES,
    MODELS,
    SCHEDULE,
    STEPS,
    VOCABULARY,
    costly_head,
    go_on,
    hf_config,
    keeper,
    make_engine,
    mine,
    position_of,
    reference,
    run_config,
)
from tests.finetune.engines.zero_worker import fp16_on_cpu, leave, same, snapshot, whole

PARITY = {
    2: {
        "gpt2-zero1": ("gpt2", 2, 1, "parameters"),
        "gpt2-head-in-pieces": ("gpt2", 2, 1, "profile"),
        "gpt_neox-head-in-pieces": ("gpt_neox", 2, 0, "profile"),
        "llama-zero0": ("llama", 2, 0, "type:DecoderLayer$"),
    },
    4: {
        "gpt_neox-zero0": ("gpt_neox", 2, 0, "uniform"),
        "gpt2-head-in-pieces": ("gpt2", 2, 1, "profile"),
        "llama-four-stages": ("llama", 4, 1, "parameters"),
    },
}
"""By ranks: model, stages, ZeRO stage, partition."""
HALF = {
    # In pieces, the head leaves rank 1 with nothing of its own to update.
    2: {"zero0-head-in-pieces": (0, "profile"), "zero1": (1, "uniform")},
    4: {"zero1-head-in-pieces": (1, "profile")},
}
"""The same of GPT-2, with tied weights, on two stages in fp16: ZeRO stage, partition."""
HALF_STEPS = 10


def parity(model: str, stages: int, zero: int, partition: str, expected: dict[str, Any]) -> dict[str, Any]:
    """Losses and norms of every step, and whether the starting weights were those of plain PyTorch."""
    engine = make_engine(model, stages=stages, zero=zero, partition=partition)
    own = engine.assignment.of(engine.stage)
    held = sum(parameter.numel() for parameter in engine.model.parameters() if not parameter.is_meta)
    begin = {name: tensor.clone() for name, tensor in engine.weights(torch.float32) if tensor is not None}
    seen = [engine.train_step(mine(engine, step), SCHEDULE.rate(step)) for step in range(STEPS)]
    return {
        "bounds": list(engine.assignment.bounds),
        "layers": engine.describe(),
        "holds_its_stage_alone": held == num_parameters(*own),
        "evaluated": engine.evaluate(mine(engine, 1))[0],
        "same_start": engine.rank != 0 or same(begin, expected["start"]),
        "losses": [outcome.loss for outcome in seen],
        "norms": [outcome.grad_norm for outcome in seen],
    }


def not_finite(zero: int, precision: str) -> dict[str, Any]:
    """One good step, one with a NaN gradient on rank 1 alone, one with an infinite loss on the last rank, one good step."""
    # With the head in pieces, rank 1 has nothing of its own to update.
    engine = make_engine("gpt2", zero=zero, precision=precision, partition="profile" if precision == "bf16" else "uniform")
    seen = [engine.train_step(mine(engine, 0), 1e-3)]
    before, optimizer_steps = snapshot(engine), engine.optimizer_steps
    if engine.rank == 1:
        own = next(parameter for parameter in engine.model.parameters() if not parameter.is_meta and parameter.dim() == 2)
        handle = own.register_hook(lambda gradient: gradient * math.nan)
    seen.append(engine.train_step(mine(engine, 1), 1e-3))
    if engine.rank == 1:
        handle.remove()
    if engine.rank == engine.world_size - 1:
        add = engine._tally.add
        engine._tally.add = lambda loss: add(loss * math.inf)  # type: ignore[method-assign]
    seen.append(engine.train_step(mine(engine, 2), 1e-3))
    untouched = same(before, snapshot(engine)) and engine.optimizer_steps == optimizer_steps
    if engine.rank == engine.world_size - 1:
        engine._tally.add = add  # type: ignore[method-assign]
    seen.append(engine.train_step(mine(engine, 3), 1e-3))
    after = snapshot(engine)
    return {
        "skipped": [outcome.skipped for outcome in seen],
        "untouched": untouched,
        "moved_on": engine.rank != 0 or not same(before, after),
        "finite": all(bool(tensor.isfinite().all()) for tensor in after.values()),
    }


def resumed(output: Path, zero: int, precision: str) -> dict[str, Any]:
    """Losses of steps 4 to 7, with dropout: uninterrupted, and resumed from a state saved after step 3."""
    torch.manual_seed(100 + int(os.environ["RANK"]))
    engine = make_engine("gpt2", zero=zero, precision=precision, dropout=True)
    for step in range(4):
        engine.train_step(mine(engine, step), SCHEDULE.rate(step))
    keeper(output, "gpt2").save(engine, position_of(engine))
    buckets = buckets_of(engine)
    losses = {"uninterrupted": go_on(engine)}
    final = snapshot(engine)
    state = ResumeState(open_checkpoint(output / "resume"))
    again = make_engine("gpt2", zero=zero, precision=precision, dropout=True, fill=state.fill)
    state.restore(again)
    losses["resumed"] = go_on(again)
    return {"losses": losses, "bitwise": same(final, snapshot(again)), "buckets": buckets}


def buckets_of(engine: PipelineEngine) -> list[int]:
    """How many buckets of gradients there are whenever one is reduced, which fills as training goes on."""
    seen: list[int] = []
    zero: Any = engine._optimizer._wrapper
    if isinstance(zero, DeepSpeedZeroOptimizer):
        reduce = zero.allreduce_bucket

        def counted(*args: Any, **words: Any) -> torch.Tensor:
            seen.append(sum(len(bucket.buffer) for bucket in zero.ipg_buckets.values()))
            reduced: torch.Tensor = reduce(*args, **words)
            return reduced

        zero.allreduce_bucket = counted  # type: ignore[method-assign]
    return seen


def half(output: Path, zero: int, partition: str) -> dict[str, Any]:
    """fp16: good steps, steps that overflow, good steps, the last of them again from a save, and one of large sums."""
    engine = make_engine("gpt2", zero=zero, precision="fp16", partition=partition, fill=fill_as_fp32)
    assert engine.loss_scale is not None
    losses = [engine.train_step(mine(engine, step), SCHEDULE.rate(step)).loss for step in range(HALF_STEPS)]
    squares = [float(tensor.square().sum()) for name, tensor in snapshot(engine).items() if name.startswith("exp_avg.")]
    seen = {"losses": losses, "good_steps": engine.loss_scale.good_steps, "momentum": math.sqrt(sum(squares))}
    seen |= overflows(engine)
    good = [engine.train_step(mine(engine, 1), 1e-3)]
    keeper(output, "gpt2").save(engine, position_of(engine))
    good.append(engine.train_step(mine(engine, 2), 1e-3))
    state = ResumeState(open_checkpoint(output / "resume"))
    again = make_engine("gpt2", zero=zero, precision="fp16", partition=partition, fill=state.fill)
    state.restore(again)
    resumed = again.train_step(mine(again, 2), 1e-3)
    return {
        **seen,
        "good": [outcome.skipped for outcome in good],
        "norm": good[0].grad_norm,
        "next_loss": good[1].loss,
        "bitwise": resumed == good[1] and same(snapshot(engine), snapshot(again)),
        "resumed_scale": [position_of(each).loss_scale for each in (engine, again)],
        **large_sums(again),
    }


def overflows(engine: PipelineEngine) -> dict[str, Any]:
    """Steps at a scale that is too large, with an infinite gradient at a small one, and with infinite activations."""
    assert engine.loss_scale is not None
    before, optimizer_steps = snapshot(engine), engine.optimizer_steps
    broken = engine.data_rank == engine.data_ranks - 1  # a single rank of a stage
    weight = engine.model.get_parameter("transformer.h.0.mlp.c_fc.weight")
    act = engine.model.get_submodule("transformer.h.2.mlp.act")
    seen, scales = [], []
    for scale, break_it in (
        (2.0**60, None),
        (2.0**9, lambda: weight.register_hook(lambda gradient: gradient * (math.inf if broken else 1.0))),
        (2.0**8, lambda: act.register_forward_hook(lambda module, args, output: output * (1e7 if broken else 1.0))),
    ):
        engine.loss_scale.value = scale
        handle = break_it() if break_it else None
        seen.append(engine.train_step(mine(engine, HALF_STEPS), 1e-3, diagnose=True))
        scales.append(engine.loss_scale.value)
        if handle is not None:
            handle.remove()
    return {
        "skipped": [outcome.skipped for outcome in seen],
        "diagnoses": [outcome.diagnosis for outcome in seen],
        "scales": scales,
        "untouched": same(before, snapshot(engine)) and engine.optimizer_steps == optimizer_steps,
    }


def large_sums(engine: PipelineEngine) -> dict[str, Any]:
    """A step in which both stages have a gradient of the tied weight in each micro-batch that fp16 holds, but not their sum."""
    assert engine.loss_scale is not None
    engine.loss_scale.value = 2.0**16
    tied = next(engine.model.parameters())
    handle = tied.register_hook(lambda gradient: torch.full_like(gradient, 6e4))
    outcome = engine.train_step(mine(engine, 3), 1e-3)
    handle.remove()
    expected = math.sqrt(tied.numel()) * 6e4 / 2.0**16 * engine.assignment.stages * MICROBATCHES / engine.data_ranks
    return {"large_sums": outcome.skipped, "large_sums_norm": outcome.grad_norm / expected}


def half_elsewhere(output: Path) -> dict[str, Any]:
    """The step after ``half``'s save on one stage, and without a pipeline: loss, and scale and good steps after it."""

    def without(fill: Callable[..., None]) -> ZeroEngine:
        groups.mpu = None  # DeepSpeed remembers the last pipeline's ranks
        with fp16_on_cpu():
            config = run_config("gpt2", 1, 2)
            return ZeroEngine(config, hf_config("gpt2"), fill, device=torch.device("cpu"), precision="fp16", cpu_adam=False)

    def alone(fill: Callable[..., None]) -> PipelineEngine:
        return make_engine("gpt2", stages=1, zero=0, precision="fp16", fill=fill)

    seen = {}
    for name, make in {"one stage": alone, "no pipeline": without}.items():
        state = ResumeState(open_checkpoint(output / "resume"))
        engine = make(state.fill)
        state.restore(engine)
        loss = engine.train_step(mine(engine, 2), 1e-3).loss
        assert engine.loss_scale is not None
        seen[name] = (loss, [engine.loss_scale.value, engine.loss_scale.good_steps])
    return seen


def fill_as_fp32(model: PreTrainedModel, gather: Any) -> None:
    """The starting weights of ``reference``, rounded: drawn in another type they would be others."""
    plain = build_empty(hf_config("gpt2"), torch.float32, nullcontext())
    initialise(plain, whole, 5)
    fill(model, dict(plain.named_parameters()).__getitem__, gather)


def elsewhere(output: Path) -> dict[str, list[float]]:
    """Losses of steps 4 to 7 of a state saved by two stages: there, on one stage, and without a pipeline; and back."""
    engine = make_engine("gpt2")
    for step in range(4):
        engine.train_step(mine(engine, step), SCHEDULE.rate(step))
    position = position_of(engine)
    keeper(output / "pipeline", "gpt2").save(engine, position)
    losses = {"uninterrupted": go_on(engine)}

    def from_state(path: Path, make: Callable[..., TrainingEngine]) -> TrainingEngine:
        state = ResumeState(open_checkpoint(path / "resume"))
        engine = make(fill=state.fill)
        state.restore(engine)
        return engine

    def zero3(fill: Callable[..., None]) -> ZeroEngine:
        config = run_config("gpt2", 1, 3)
        return ZeroEngine(config, hf_config("gpt2"), fill, device=torch.device("cpu"), precision="fp32", cpu_adam=False)

    losses["one stage"] = go_on(from_state(output / "pipeline", lambda fill: make_engine("gpt2", stages=1, fill=fill)))
    without = from_state(output / "pipeline", zero3)
    keeper(output / "zero", "gpt2").save(without, position)
    losses["no pipeline"] = go_on(without)
    losses["back"] = go_on(from_state(output / "zero", lambda fill: make_engine("gpt2", zero=0, fill=fill)))
    return losses


def checkpointed() -> dict[str, list[float]]:
    """Losses with dropout and a head in pieces, activations kept and computed again, logits whole and in rows."""
    losses = {}
    ways = {
        "none": {},
        "device": {"checkpoint": "device"},
        "cpu": {"checkpoint": "cpu"},
        "rows": {"loss_rows": 3},
        "whole": {"loss_rows": 0},
    }
    for way, settings in ways.items():
        activations = ActivationConfig(**settings)  # type: ignore[arg-type]
        engine = make_engine("gpt2", dropout=True, partition="profile", activations=activations)
        torch.manual_seed(7 + engine.rank)
        losses[way] = [engine.train_step(mine(engine, step), 1e-3).loss for step in range(4)]
    return losses


def packed(model: str) -> dict[str, Any]:
    """A step and an evaluation of samples packed into one row, and of the same samples apart."""
    draw = torch.Generator().manual_seed(3)
    lengths = (7, 4, 5)
    samples = [torch.randint(0, VOCABULARY, (2, length + 1), generator=draw) for length in lengths]
    segments = torch.cat([torch.full((2, length), number) for number, length in enumerate(lengths)], dim=1)
    inputs = torch.cat([sample[:, :-1] for sample in samples], dim=1)
    row = Microbatch(inputs, torch.cat([sample[:, 1:] for sample in samples], dim=1), segments)
    plain = build_empty(hf_config(model), torch.float32, nullcontext())
    initialise(plain, whole, 5)
    apart = sum(
        float(token_losses(plain(input_ids=sample[:, :-1], use_cache=False).logits, sample[:, 1:])) for sample in samples
    )
    engine = make_engine(model)
    loss_sum, count = engine.evaluate([row])
    outcome = engine.train_step([row] * MICROBATCHES, 1e-3)
    return {"packed": [loss_sum / count, outcome.loss], "apart": apart / row.num_targets}


def mixed_shapes() -> dict[str, float]:
    """An evaluation whose batches differ in length and in being packed, here and in plain PyTorch."""
    draw = torch.Generator().manual_seed(4)
    rows = [torch.randint(0, VOCABULARY, (2, length + 1), generator=draw) for length in (16, 9, 12)]
    batches = [Microbatch(row[:, :-1], row[:, 1:]) for row in rows]
    batches[1] = replace(batches[1], segments=torch.zeros_like(batches[1].inputs))
    plain = build_empty(hf_config("gpt2"), torch.float32, nullcontext())
    initialise(plain, whole, 5)
    with torch.no_grad():
        expected = [float(token_losses(plain(batch.inputs, use_cache=False).logits, batch.targets)) for batch in batches]
    return {"pipeline": make_engine("gpt2").evaluate(batches)[0], "plain": sum(expected)}


def served(output: Path, model: str) -> float:
    """Largest difference between the evaluation of the trained engine and that of its checkpoint in transformers."""
    engine = make_engine(model, zero=0)
    for step in range(2):
        engine.train_step(mine(engine, step), 1e-2)
    position = RunPosition(step=2, samples=0, tokens=0, optimizer_steps=engine.optimizer_steps, skipped_in_a_row=0)
    path = keeper(output, model).save(engine, position)
    batches = mine(engine, 5)
    loss_sum, _ = engine.evaluate(batches)
    if engine.rank != 0:
        return 0.0
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        expected = sum(float(token_losses(plain(batch.inputs).logits, batch.targets)) for batch in batches)
    return abs(loss_sum - expected) / abs(expected)


def main(out: Path) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start_ranks("cpu", rank)
    finetune.engines.pipeline.assignment.measure = costly_head  # type: ignore[assignment]
    report: dict[str, Any] = {"reference": {}, "parity": {}}
    for case, (model, stages, zero, partition) in PARITY[ranks].items():
        if model not in report["reference"]:
            report["reference"][model] = reference(model) if rank == 0 else {"start": {}}
        report["parity"][case] = parity(model, stages, zero, partition, report["reference"][model])
    for expected in report["reference"].values():
        del expected["start"]
    precisions = ((0, "fp32"), (1, "fp32"), (1, "bf16"))
    report["not_finite"] = {f"zero{zero}-{precision}": not_finite(zero, precision) for zero, precision in precisions}
    report["resumed"] = {
        f"zero{zero}-{precision}": resumed(out / f"resumed-{zero}-{precision}", zero, precision)
        for zero, precision in (precisions if ranks == 2 else precisions[1:2])
    }
    report["half"] = {case: half(out / f"half-{case}", *settings) for case, settings in HALF[ranks].items()}
    if ranks == 2:
        report["half_elsewhere"] = half_elsewhere(out / "half-zero1")
        report["elsewhere"] = elsewhere(out / "elsewhere")
        report["checkpointed"] = checkpointed()
        report["packed"] = {model: packed(model) for model in MODELS}
        report["mixed_shapes"] = mixed_shapes()
        report["served"] = {model: served(out / f"served-{model}", model) for model in MODELS}
    (out / f"rank-{rank}.json").write_text(json.dumps(report))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
