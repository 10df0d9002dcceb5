"""Small pipelines for tests: their models, data and engines, and what plain PyTorch makes of the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.config import (
    ActivationConfig,
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
from finetune.engines.pipeline.engine import PipelineEngine
from finetune.engines.pipeline.layers import HeadLayer, Layer
from finetune.engines.protocol import TrainingEngine
from finetune.model.build import build_empty, decay_groups, initialise, new_config, saved_config
from finetune.model.loss import token_losses
from finetune.train.position import RunPosition
from finetune.train.saving import CheckpointSaver
from finetune.train.schedule import Schedule
from tests.finetune.engines.zero_worker import fp16_on_cpu, whole

STEPS = 20
VOCABULARY = 61
LENGTH = 16
MICROBATCHES = 4
"""Of one step, all pipelines together."""
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 36, "n_layer": 3, "n_head": 4},
    "gpt_neox": {
        "model_type": "gpt_neox",
        "hidden_size": 36,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 50,
    },
    "llama": {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 50,
    },
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPTIMIZER = OptimizerConfig(lr=3e-3, weight_decay=0.1, clip=0.5)
SCHEDULE = Schedule(STEPS, 3, OPTIMIZER.lr, 0.1)


def hf_config(model: str, *, dropout: bool = False) -> Any:
    settings = {**MODELS[model], **(NO_DROPOUT if model == "gpt2" and not dropout else {}), "vocab_size": VOCABULARY}
    return new_config(settings, num_ids=VOCABULARY, seq_len=LENGTH, end_of_text_id=0)


def step_data(step: int) -> list[Microbatch]:
    """All micro-batches of one step, every pipeline's: targets that do not count are spread unevenly."""
    draw = torch.Generator().manual_seed(step % 4)
    batches = []
    for number in range(MICROBATCHES):
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=draw)
        targets = tokens[:, 1:].clone()
        targets[:, : 3 * number] = -100
        batches.append(Microbatch(tokens[:, :-1], targets))
    return batches


def mine(engine: TrainingEngine, step: int) -> list[Microbatch]:
    return step_data(step)[engine.data_rank :: engine.data_ranks]


def reference(model_name: str) -> dict[str, Any]:
    """Plain PyTorch on the whole batch: losses and gradient norms of every step, and the starting weights."""
    model = build_empty(hf_config(model_name), torch.float32, nullcontext())
    initialise(model, whole, 5)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(decay_groups(model, OPTIMIZER.weight_decay), betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)  # type: ignore[arg-type]
    losses, norms = [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = SCHEDULE.rate(step)
        inputs = torch.cat([batch.inputs for batch in step_data(step)])
        targets = torch.cat([batch.targets for batch in step_data(step)])
        loss = token_losses(model(input_ids=inputs, use_cache=False).logits, targets) / (targets != -100).sum()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        evaluated = [
            float(token_losses(model(input_ids=batch.inputs, use_cache=False).logits, batch.targets)) for batch in step_data(1)
        ]
    return {"losses": losses, "norms": norms, "start": start, "evaluated": sum(evaluated)}


def make_engine(
    model: str,
    *,
    stages: int = 2,
    zero: int = 1,
    precision: str = "fp32",
    dropout: bool = False,
    fill: Callable[..., None] | None = None,
    optimizer: OptimizerConfig = OPTIMIZER,
    activations: ActivationConfig | None = None,
    **pipeline: Any,
) -> PipelineEngine:
    config = run_config(model, stages, zero, optimizer=optimizer, **pipeline)
    config = replace(config, activations=activations or ActivationConfig())
    fill = fill or (lambda model, gather: initialise(model, gather, 5))
    settings = hf_config(model, dropout=dropout)
    with fp16_on_cpu():
        return PipelineEngine(config, settings, fill, device=torch.device("cpu"), precision=precision)


def run_config(model: str, stages: int, zero: int, *, optimizer: OptimizerConfig = OPTIMIZER, **pipeline: Any) -> TuneConfig:
    ranks = int(os.environ["WORLD_SIZE"])
    return TuneConfig(
        run=RunConfig(output="no-such-folder", ranks=ranks),
        data=DataConfig(train=("unused",), seq_len=LENGTH),
        model=ModelConfig(new=MODELS[model]),
        tokenizer=TokenizerConfig(path="unused"),
        batch=BatchConfig(micro=2, accumulation=MICROBATCHES * stages // ranks),
        optimizer=optimizer,
        zero=ZeroConfig(stage=zero),  # type: ignore[arg-type]
        pipeline=PipelineConfig(stages=stages, **{"partition": "uniform", **pipeline}),
    )


def costly_head(layers: Sequence[Layer], **_: Any) -> list[float]:
    """Costs as of a very large vocabulary, which only a head in pieces can balance."""
    return [30.0 / layer._pieces if isinstance(layer, HeadLayer) else 1.0 for layer in layers]


def keeper(output: Path, model: str) -> CheckpointSaver:
    return CheckpointSaver(
        output=output,
        config=saved_config(hf_config(model), torch.float32),
        generation_config={},
        tokenizer_files=(),
        dtype=torch.float32,
        from_master=True,
        max_shard_bytes=1 << 20,
        keep=0,
        resume_state=True,
        settings={},
    )


def go_on(engine: TrainingEngine) -> list[float]:
    return [engine.train_step(mine(engine, step), SCHEDULE.rate(step)).loss for step in range(4, 8)]


def position_of(engine: TrainingEngine) -> RunPosition:
    """How far ``engine`` is, as a run would save it."""
    scale = engine.loss_scale
    kept = None if scale is None else (scale.value, scale.good_steps)
    return RunPosition(step=4, samples=0, tokens=0, optimizer_steps=engine.optimizer_steps, skipped_in_a_row=0, loss_scale=kept)
