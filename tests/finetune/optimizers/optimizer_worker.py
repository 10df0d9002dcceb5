"""One of the ranks that train with Muon and Adafactor: ``python -m tests.finetune.optimizers.optimizer_worker OUT``.

Two ranks go first, through all cases; one rank alone repeats some and goes on from what the two have saved.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from checkpoint import open_checkpoint
from finetune.config import (
    BatchConfig,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    RunConfig,
    TokenizerConfig,
    TuneConfig,
    ZeroConfig,
    to_deepspeed,
)
from finetune.data.batches import Microbatch
from finetune.engines.zero import engine as ds
from finetune.engines.zero.engine import ZeroEngine
from finetune.model.build import build_empty, decay_groups, initialise, new_config
from finetune.model.loss import token_losses
from finetune.train.position import RunPosition
from finetune.train.resume import ResumeState
from finetune.train.schedule import Schedule
from tests.finetune.engines.zero_worker import SETTINGS, keeper, leave, not_finite, same, snapshot, step_data, whole

STEPS = 10
SAVED, RESUMED = 4, 7
"""Steps after which a run is saved, and after which one that goes on is looked at."""
OPTIMIZERS = ("muon", "adafactor")
MODELS: dict[str, dict[str, Any]] = {
    "gpt_neox": {**SETTINGS, "attention_bias": False},
    # Transposed weights, a tied output layer, and fewer matrices for one rank than for the other.
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 36,
        "n_layer": 1,
        "n_head": 4,
        "n_inner": 50,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
CASES = {
    "zero1": (1, "none", "none"),
    "zero2": (2, "none", "none"),
    "zero3": (3, "none", "none"),
    "zero2-offload": (2, "cpu", "none"),
    "zero3-offload": (3, "cpu", "cpu"),
}
SUB_GROUP = 3000
"""Elements of one sub-group where a rank's share is to be cut into several."""
ALL_SAMPLES = 4
"""Micro-batches of one step, all ranks together."""


def settings(name: str) -> OptimizerConfig:
    return OptimizerConfig(name=name, lr=1e-2, weight_decay=0.1, clip=0.5)  # type: ignore[arg-type]


SCHEDULE = Schedule(STEPS, 3, settings("muon").lr, 0.1)


def hf_config(model: str) -> Any:
    return new_config({**MODELS[model], "vocab_size": 61}, num_ids=61, seq_len=16, end_of_text_id=0)


def fill(model: nn.Module, gather: Any) -> None:
    """First weights, the same everywhere."""
    initialise(model, gather, 5)  # type: ignore[arg-type]
    still_keys(model)


def still_keys(model: nn.Module) -> None:
    """Have the bias of GPT-2's keys stay as it is: its gradient is rounding alone, which optimizers blow up."""
    for n, parameter in model.named_parameters():
        if n.endswith("c_attn.bias"):
            others = torch.ones(3, 36)
            others[1] = 0.0
            parameter.register_hook(lambda gradient, others=others: gradient * others.flatten().to(gradient.dtype))


def make_engine(name: str, case: str, **more: Any) -> ZeroEngine:
    stage, optimizer, parameters = CASES[case]
    offload = OffloadConfig(optimizer=optimizer, parameters=parameters)  # type: ignore[arg-type]
    return engine_of(settings(name), stage, offload, **more)


def engine_of(
    options: OptimizerConfig, stage: int, offload: OffloadConfig, *, model: str = "gpt_neox", lora: bool = False, **more: Any
) -> ZeroEngine:
    ranks = int(os.environ["WORLD_SIZE"])
    config = TuneConfig(
        run=RunConfig(output="unused", ranks=ranks),
        data=DataConfig(train=("unused",)),
        model=ModelConfig(path="unused") if lora else ModelConfig(new=MODELS[model]),
        lora=LoraConfig(rank=3) if lora else None,
        tokenizer=TokenizerConfig(path="unused"),
        batch=BatchConfig(micro=2, accumulation=ALL_SAMPLES // ranks),
        optimizer=options,
        zero=ZeroConfig(stage=stage),  # type: ignore[arg-type]
        offload=offload,
    )
    usual = {"precision": "fp32", "fill": fill}
    return ZeroEngine(config, hf_config(model), device=torch.device("cpu"), cpu_adam=False, **{**usual, **more})


def train(engine: ZeroEngine, steps: Iterable[int]) -> list[float]:
    """Losses of these steps."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    return [engine.train_step(step_data(step)[rank::ranks], SCHEDULE.rate(step)).loss for step in steps]


# -- what torch's own optimizers do, in one process


def torch_optimizers(options: OptimizerConfig, model: nn.Module) -> list[torch.optim.Optimizer]:
    if options.name == "adafactor":
        # torch's scales the rate by the weights' length, at least by the second epsilon: here that is always 2.
        groups = decay_groups(model, 2 * options.weight_decay)
        return [torch.optim.Adafactor(groups, eps=(1e-15, 2.0), beta2_decay=-0.8, d=1.0)]
    blocks = {n for n, p in model.named_parameters() if p.ndim == 2 and (".layers." in n or ".h." in n)}
    others = {n for n, _ in model.named_parameters()} - blocks
    matrices = decay_groups(model, options.weight_decay, only=blocks)
    return [
        torch.optim.Muon(matrices, momentum=options.momentum, nesterov=True, ns_steps=5, adjust_lr_fn="match_rms_adamw"),  # type: ignore[arg-type]
        torch.optim.AdamW(
            decay_groups(model, options.weight_decay, only=others),
            betas=options.betas,
            eps=options.eps,  # type: ignore[arg-type]
        ),
    ]


def reference(name: str, model_name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of every step on the whole batch, and the weights in the end."""
    model = build_empty(hf_config(model_name), torch.float32, nullcontext())
    fill(model, whole)
    optimizers = torch_optimizers(settings(name), model)
    losses = train_plainly(model, optimizers, settings(name), [(step_data(step), SCHEDULE.rate(step)) for step in range(STEPS)])
    return losses, {n: parameter.detach() for n, parameter in model.named_parameters()}


def train_plainly(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    options: OptimizerConfig,
    steps: Iterable[tuple[list[Microbatch], float]],
) -> list[float]:
    """Losses of ``steps``, the micro-batches and the rate of each, by plain PyTorch on the whole batch."""
    losses = []
    for batches, rate in steps:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate / (2 if options.name == "adafactor" else 1)
        inputs = torch.cat([batch.inputs for batch in batches])
        targets = torch.cat([batch.targets for batch in batches])
        loss = token_losses(model(input_ids=inputs, use_cache=False).logits, targets) / (targets != -100).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        # torch's Muon always computes in bf16; without that it is the same in fp32.
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parity(make: Callable[[], ZeroEngine], expected: dict[str, torch.Tensor], *, steps: int = STEPS) -> dict[str, Any]:
    """Losses, and the largest difference of a weight in the end."""
    engine = make()
    losses = train(engine, range(steps))
    found = [(n, tensor) for n, tensor in engine.weights(torch.float32, from_master=True) if tensor is not None]
    return {"losses": losses, "difference": max((float((t - expected[n]).abs().max()) for n, t in found), default=0.0)}


def in_sub_groups(make: Callable[[], ZeroEngine]) -> ZeroEngine:
    """The engine with ZeRO-3's share cut into many flat tensors, each updated by a step of its own."""

    def cut(*args: Any, **kwargs: Any) -> dict[str, Any]:
        made = to_deepspeed(*args, **kwargs)
        made["zero_optimization"]["sub_group_size"] = SUB_GROUP
        return made

    with mock.patch.object(ds, "to_deepspeed", cut):
        engine = make()
    assert len(engine._optimizer.updated()) > 3, "the share was to be cut"
    return engine


def resumed(name: str, output: Path) -> dict[str, Any]:
    """Losses after the save: uninterrupted, resumed in the same layout, resumed in others."""
    engine = make_engine(name, "zero3-offload")
    train(engine, range(SAVED))
    keeper(output).save(
        engine, RunPosition(step=SAVED, samples=0, tokens=0, optimizer_steps=engine.optimizer_steps, skipped_in_a_row=0)
    )
    losses = {"uninterrupted": train(engine, range(SAVED, RESUMED))}
    final = snapshot(engine)
    bitwise = False
    for case in ("zero3-offload", "zero3", "zero2-offload", "zero1"):
        again = restored(name, case, output)
        losses[case] = train(again, range(SAVED, RESUMED))
        if case == "zero3-offload":
            bitwise = same(final, snapshot(again))
    return {"losses": losses, "bitwise": bitwise, "state": {key: list(tensor.shape) for key, tensor in final.items()}}


def restored(name: str, case: str, output: Path) -> ZeroEngine:
    state = ResumeState(open_checkpoint(output / "resume"))
    engine = make_engine(name, case, fill=state.fill)
    state.restore(engine)
    return engine


def adapters(engine: ZeroEngine, *, steps: int = 5) -> dict[str, Any]:
    """Losses with LoRA, and what the optimizer keeps of each adapter."""
    losses = train(engine, range(steps))
    unset_hf_deepspeed_config()  # or later models would be built partitioned
    return {"losses": losses, "keys": sorted({key.split(".", 1)[0] for key, _ in engine.optimizer_state()})}


def pair(name: str, rank: int, out: Path) -> dict[str, Any]:
    """What two ranks go through."""
    losses, weights = reference(name, "gpt_neox")
    gpt2_losses, gpt2_weights = reference(name, "gpt2")
    return {
        "reference": losses,
        "parity": {
            **{case: parity(lambda case=case: make_engine(name, case), weights) for case in CASES},
            "zero3 in sub-groups": parity(lambda: in_sub_groups(lambda: make_engine(name, "zero3")), weights),
        },
        "reference of gpt2": gpt2_losses,
        "gpt2": {
            case: parity(lambda case=case: make_engine(name, case, model="gpt2"), gpt2_weights) for case in ("zero2", "zero3")
        },
        "not_finite": {
            f"{case}-{precision}": not_finite(make_engine(name, case, precision=precision), rank)
            for case, precision in (("zero1", "fp32"), ("zero2-offload", "bf16"), ("zero3", "bf16"), ("zero3-offload", "fp32"))
        },
        "resumed": resumed(name, out / name),
        "adapters": {case: adapters(make_engine(name, case, lora=True)) for case in ("zero1", "zero3")},
    }


def alone(name: str, out: Path) -> dict[str, Any]:
    """What one rank goes through, after the two."""
    losses, weights = reference(name, "gpt_neox")
    return {
        "reference": losses,
        "parity": {case: parity(lambda case=case: make_engine(name, case), weights) for case in ("zero1", "zero2", "zero3")},
        "resumed": {case: train(restored(name, case, out / name), range(SAVED, RESUMED)) for case in ("zero1", "zero3")},
    }


def main(out: Path) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ds.start_ranks("cpu", rank)
    report = {name: pair(name, rank, out) if ranks > 1 else alone(name, out) for name in OPTIMIZERS}
    (out / f"{ranks}-rank-{rank}.json").write_text(json.dumps(report))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
