"""One of the ranks that train with ZenFlow: ``python -m tests.finetune.optimizers.zenflow_worker OUT``.

Two ranks go first, through all cases; one rank alone repeats some and goes on from what the two have saved.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpoint import open_checkpoint
from finetune.config import OffloadConfig, OptimizerConfig, ZenFlowConfig
from finetune.engines.zero import engine as ds
from finetune.engines.zero.engine import ZeroEngine
from finetune.model.build import build_empty, decay_groups
from finetune.model.loss import token_losses
from finetune.train.position import RunPosition
from finetune.train.resume import ResumeState
from tests.finetune.engines.zero_worker import keeper, leave, not_finite, same, snapshot, step_data, whole
from tests.finetune.optimizers import optimizer_worker
from tests.finetune.optimizers.optimizer_worker import SCHEDULE, engine_of, fill, hf_config, in_sub_groups, settings, train

STEPS = 14
PACES = ZenFlowConfig(share=0.2, update_every=2, select_every=6)
SAVED, RESUMED = 5, 11
"""Saved with one update under way and gradients put off; in between rows are chosen anew."""
CASES = {"zero1": (1, "none"), "zero2": (2, "none"), "zero3": (3, "cpu")}
OPTIONS = settings("adamw")
NO_EPSILON = replace(OPTIONS, eps=1e-12)
"""Where AdamW corrects the start of its moments, epsilon counts otherwise than where it corrects the rate."""


def make_engine(case: str, *, paces: ZenFlowConfig = PACES, options: OptimizerConfig = OPTIONS, **more: Any) -> ZeroEngine:
    stage, parameters = CASES[case]
    offload = OffloadConfig(optimizer="cpu", parameters=parameters, method="zenflow", zenflow=paces)  # type: ignore[arg-type]
    return engine_of(options, stage, offload, **more)


class Matrix:
    """ZenFlow of one whole matrix, written down as it is explained, with masks instead of pieces."""

    def __init__(self, weight: nn.Parameter, decay: float, paces: ZenFlowConfig) -> None:
        self.weight, self.decay, self.paces = weight, decay, paces
        self.first, self.second, self.sum, self.pending = (torch.zeros_like(weight) for _ in range(4))
        self.updates = torch.zeros(len(weight), 1)
        self.chosen = torch.zeros(len(weight), 1, dtype=torch.bool)
        self.steps = 0

    def moved(self, gradient: torch.Tensor, rows: torch.Tensor, rate: float) -> torch.Tensor:
        """What AdamW takes from the weights, for some rows; zero elsewhere."""
        (b1, b2), self.updates = OPTIONS.betas, self.updates + rows
        self.first = torch.where(rows, b1 * self.first + (1 - b1) * gradient, self.first)
        self.second = torch.where(rows, b2 * self.second + (1 - b2) * gradient**2, self.second)
        corrected = (1 - b2**self.updates).sqrt() / (1 - b1**self.updates)
        moved = corrected * self.first / (self.second.sqrt() + OPTIONS.eps) + self.decay * self.weight
        return torch.where(rows, rate * moved, 0.0)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        gradient, every = self.weight.grad, self.paces.update_every
        assert gradient is not None
        if self.steps == every or self.steps % self.paces.select_every == 0:
            count = max(1, round(self.paces.share * len(gradient)))
            self.chosen[:] = False
            self.chosen[gradient.norm(dim=1).argsort(descending=True, stable=True)[:count]] = True
        self.steps += 1
        self.weight -= self.moved(gradient, self.chosen, rate)
        self.sum += gradient
        if self.steps % every == 0:
            self.weight -= self.pending
            self.pending = self.moved(self.sum / every, ~self.chosen, rate)
            self.sum = torch.zeros_like(self.sum)
        if self.steps == every or self.steps % self.paces.select_every == 0:
            self.weight -= self.pending
            self.pending = torch.zeros_like(self.pending)


def reference(paces: ZenFlowConfig | None, model_name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of every step in one process, and the weights in the end; of torch's AdamW without ``paces``."""
    model = build_empty(hf_config(model_name), torch.float32, nullcontext())
    fill(model, whole)
    names = {n for n, p in model.named_parameters() if p.ndim == 2 and paces is not None}
    matrices = [
        Matrix(weight, group["weight_decay"], paces)  # type: ignore[arg-type]
        for group in decay_groups(model, OPTIONS.weight_decay, only=names)
        for weight in group["params"]
    ]
    others = decay_groups(model, OPTIONS.weight_decay, only={n for n, _ in model.named_parameters()} - names)
    eps = OPTIONS.eps if paces is not None else NO_EPSILON.eps
    adamw = torch.optim.AdamW(others, betas=OPTIONS.betas, eps=eps)  # type: ignore[arg-type]
    losses = []
    for step in range(STEPS):
        batches, rate = step_data(step), SCHEDULE.rate(step)
        targets = torch.cat([batch.targets for batch in batches])
        logits = model(input_ids=torch.cat([batch.inputs for batch in batches]), use_cache=False).logits
        loss = token_losses(logits, targets) / (targets != -100).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIONS.clip)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        for matrix in matrices:
            matrix.step(rate)
        model.zero_grad()
        losses.append(loss.item())
    return losses, {n: parameter.detach() for n, parameter in model.named_parameters()}


def parity(make: Callable[[], ZeroEngine], expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    return optimizer_worker.parity(make, expected, steps=STEPS)


def resumed(output: Path) -> dict[str, Any]:
    """Losses after the save: uninterrupted, resumed in the same layout, resumed in others."""
    engine, unsaved = make_engine("zero3"), make_engine("zero3")
    train(engine, range(SAVED))
    keeper(output).save(
        engine, RunPosition(step=SAVED, samples=0, tokens=0, optimizer_steps=engine.optimizer_steps, skipped_in_a_row=0)
    )
    losses = {"uninterrupted": train(engine, range(SAVED, RESUMED)), "never saved": train(unsaved, range(RESUMED))[SAVED:]}
    final = snapshot(engine)
    alike = {"never saved": same(final, snapshot(unsaved))}
    for case in CASES:
        again = restored(case, output)
        losses[case] = train(again, range(SAVED, RESUMED))
        alike[case] = same(final, snapshot(again))
    return {"losses": losses, "alike": alike, "state": {key: list(tensor.shape) for key, tensor in final.items()}}


def restored(case: str, output: Path) -> ZeroEngine:
    state = ResumeState(open_checkpoint(output / "resume"))
    engine = make_engine(case, fill=state.fill)
    state.restore(engine)
    return engine


def order(case: str) -> list[str]:
    """What one step does, of which the order matters."""
    engine, done = make_engine(case), []
    for owner, name in ((engine._optimizer, "release_gradients"), (engine._engine, "backward")):
        usual = getattr(owner, name)
        setattr(owner, name, lambda *words, name=name, usual=usual, **more: done.append(name) or usual(*words, **more))
    train(engine, range(2))
    engine._optimizer.close()
    return done


def pair(rank: int, out: Path) -> dict[str, Any]:
    """What two ranks go through."""
    losses, weights = reference(PACES, "gpt_neox")
    gpt2_losses, gpt2_weights = reference(PACES, "gpt2")
    whole_losses, whole_weights = reference(None, "gpt_neox")
    everything = ZenFlowConfig(share=1.0, update_every=2, select_every=6)
    return {
        "reference": losses,
        "parity": {
            **{case: parity(lambda case=case: make_engine(case), weights) for case in CASES},
            "zero3 in sub-groups": parity(lambda: in_sub_groups(lambda: make_engine("zero3")), weights),
        },
        "reference of gpt2": gpt2_losses,
        "gpt2": parity(lambda: make_engine("zero3", model="gpt2"), gpt2_weights),
        "adamw": whole_losses,
        "all chosen": parity(lambda: make_engine("zero2", paces=everything, options=NO_EPSILON), whole_weights),
        "not_finite": {
            f"{case}-{precision}": not_finite(make_engine(case, precision=precision), rank)
            for case, precision in (("zero1", "fp32"), ("zero2", "bf16"), ("zero3", "bf16"))
        },
        "resumed": resumed(out / "run"),
        "order": order("zero2"),
        "adapters": {case: optimizer_worker.adapters(make_engine(case, lora=True), steps=8) for case in ("zero2", "zero3")},
    }


def alone(out: Path) -> dict[str, Any]:
    """What one rank goes through, after the two."""
    losses, weights = reference(PACES, "gpt_neox")
    return {
        "reference": losses,
        "parity": parity(lambda: make_engine("zero2"), weights),
        "resumed": {case: train(restored(case, out / "run"), range(SAVED, RESUMED)) for case in ("zero1", "zero3")},
    }


def main(out: Path) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ds.start_ranks("cpu", rank)
    report = pair(rank, out) if ranks > 1 else alone(out)
    (out / f"{ranks}-rank-{rank}.json").write_text(json.dumps(report))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
