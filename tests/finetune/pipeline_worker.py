"""One of several ranks that drive the pipeline engine directly: ``python -m tests.finetune.pipeline_worker OUT STAGES``.

Starting ranks is what takes time, so one set of them goes through all cases and writes what it saw to OUT.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.config import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    RunConfig,
    TokenizerConfig,
    TuneConfig,
    ZeroConfig,
)
from finetune.data.batches import Microbatch
from finetune.engine import start_ranks
from finetune.model import build_empty, decay_groups, initialise, new_config, token_losses
from finetune.pipeline import PipelineEngine
from finetune.schedule import Schedule

STEPS = 50
VOCABULARY = 61
LENGTH = 16
ACCUMULATION = 3
MODELS: dict[str, dict[str, Any]] = {
    "gpt2-tied": {"model_type": "gpt2", "n_embd": 36, "n_layer": 3, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {"model_type": "gpt_neox", "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 50},
    "llama-gqa": {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 50,
    },
}
OPTIMIZER = OptimizerConfig(lr=3e-3, weight_decay=0.1, clip=0.5)
SCHEDULE = Schedule(STEPS, 3, OPTIMIZER.lr, 0.1)


def hf_config(model: str) -> Any:
    return new_config({**MODELS[model], "vocab_size": VOCABULARY}, num_ids=VOCABULARY, seq_len=LENGTH, end_of_text_id=0)


def step_data(step: int, groups: int) -> list[Microbatch]:
    """All micro-batches of one step, every pipeline's: targets that do not count are spread unevenly."""
    draw = torch.Generator().manual_seed(step % 4)
    batches = []
    for number in range(groups * ACCUMULATION):
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=draw)
        targets = tokens[:, 1:].clone()
        targets[:, : 2 * number] = -100
        batches.append(Microbatch(tokens[:, :-1], targets))
    return batches


@contextmanager
def whole(parameters: list[nn.Parameter]) -> Iterator[bool]:
    yield True


def reference(model_name: str, groups: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Plain PyTorch on the whole batch: losses and gradient norms of every step, and the starting weights."""
    model = build_empty(hf_config(model_name), torch.float32, nullcontext())
    initialise(model, whole, 5)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(decay_groups(model, OPTIMIZER.weight_decay), betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)  # type: ignore[arg-type]
    losses, norms = [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = SCHEDULE.rate(step)
        inputs = torch.cat([batch.inputs for batch in step_data(step, groups)])
        targets = torch.cat([batch.targets for batch in step_data(step, groups)])
        loss = token_losses(model(input_ids=inputs, use_cache=False).logits, targets) / (targets != -100).sum()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, norms, start


def make_engine(model: str, stages: int, *, zero: int = 1, precision: str = "fp32", fill: Callable[..., None] | None = None, changes: dict[str, Any] | None = None, **pipeline: Any) -> PipelineEngine:
    config = TuneConfig(
        run=RunConfig(output="unused", ranks=int(os.environ["WORLD_SIZE"])),
        data=DataConfig(train=("unused",), seq_len=LENGTH),
        model=ModelConfig(new=MODELS[model]),
        tokenizer=TokenizerConfig(path="unused"),
        batch=BatchConfig(micro=2, accumulation=ACCUMULATION),
        optimizer=OPTIMIZER,
        zero=ZeroConfig(stage=zero),  # type: ignore[arg-type]
        pipeline=PipelineConfig(stages=stages, **{"partition": "uniform", **pipeline}),
    )
    return PipelineEngine(
        config, hf_config(model), fill or (lambda model, gather: initialise(model, gather, 5)), device=torch.device("cpu"), precision=precision
    )


def parity(model: str, stages: int, zero: int, **pipeline: Any) -> dict[str, Any]:
    engine = make_engine(model, stages, zero=zero, **pipeline)
    losses, norms, start = reference(model, engine.data_ranks)
    begin = {name: tensor.clone() for name, tensor in engine.weights(torch.float32) if tensor is not None}
    same_start = engine.rank != 0 or (begin.keys() == start.keys() and all(torch.equal(begin[n], start[n]) for n in start))
    seen = []
    for step in range(STEPS):
        batches = step_data(step, engine.data_ranks)[engine.data_rank :: engine.data_ranks]
        seen.append(engine.train_step(batches, SCHEDULE.rate(step)))
    return {
        "same_start": same_start,
        "reference": losses,
        "losses": [outcome.loss for outcome in seen],
        "reference_norms": norms,
        "norms": [outcome.grad_norm for outcome in seen],
    }


def main(out: Path, stages: int) -> None:
    rank = int(os.environ["RANK"])
    start_ranks("cpu", rank)
    report: dict[str, Any] = {}
    for model in MODELS:
        for zero in (0, 1):
            seen = parity(model, stages, zero)
            report[f"{model}-zero{zero}"] = seen
            if rank == 0:
                worst = max(abs(a - b) for a, b in zip(seen["losses"], seen["reference"], strict=True))
                worst_norm = max(abs(a - b) for a, b in zip(seen["norms"], seen["reference_norms"], strict=True))
                print(model, zero, seen["same_start"], seen["losses"][0], seen["losses"][-1], worst, worst_norm, flush=True)
    (out / f"rank-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
