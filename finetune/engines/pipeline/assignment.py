"""Which layers of a model each pipeline stage has: cut as ``pipeline.partition`` says, by measured time if it says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from finetune.config import TuneConfig
from finetune.engines.pipeline import partition
from finetune.engines.pipeline.layer_costs import measure, recall, remember
from finetune.engines.pipeline.layers import Layer, num_parameters, type_of
from finetune.engines.pipeline.partition import Bounds
from finetune.errors import ConfigError

PROFILE: Final = "profile.json"
"""In the run's folder: what the layers were measured to cost."""
_MOST_PIECES: Final = 16
"""Pieces that a head is cut into at most: beyond, each is too small to be computed well."""

Split = Callable[[int], list[Layer]]
"""Makes a model's layers, its head in so many pieces."""


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """All layers of a model, and the stage that each goes to."""

    layers: Sequence[Layer]
    bounds: Bounds
    costs: Sequence[float] | None = None
    """Seconds of each layer for a micro-batch, where they were measured."""

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    def of(self, stage: int) -> Sequence[Layer]:
        """The layers of one stage."""
        return self.layers[self.bounds[stage] : self.bounds[stage + 1]]

    def users(self) -> dict[nn.Parameter, list[int]]:
        """Parameter -> the stages that compute with it. The first of them updates and saves it."""
        found: dict[nn.Parameter, list[int]] = {}
        for stage in range(self.stages):
            for parameter in nn.ModuleList(self.of(stage)).parameters():
                found.setdefault(parameter, []).append(stage)
        return found

    def describe(self, micro_batches: int) -> list[str]:
        """The stages, one line each: layers, parameters and, where they were measured, milliseconds of a micro-batch."""
        lines = []
        for stage in range(self.stages):
            layers = self.of(stage)
            line = f"stage {stage}: {_summary(layers, self.layers)}; {num_parameters(*layers):,} parameters"
            if self.costs is not None:
                line += f"; {1000 * sum(self.costs[self.bounds[stage] : self.bounds[stage + 1]]):.1f} ms"
            lines.append(line)
        if self.costs is not None and self.stages > 1:
            waiting = (self.stages - 1) / (micro_batches + self.stages - 1)
            lines.append(
                f"slowest stage: {partition.imbalance(self.costs, self.bounds):.2f} x the mean; "
                f"a step of {micro_batches} micro-batches waits {waiting:.0%} of its time"
            )
        return lines


def assign_stages(config: TuneConfig, model: PreTrainedModel, split: Split, device: torch.device) -> StageAssignment:
    """Cut the layers of ``model`` into ``pipeline.stages``. All ranks call it, and come to the same cut.

    Raises:
        ConfigError: there are too few layers.
    """
    method, stages = config.pipeline.partition, config.pipeline.stages
    layers, costs = _measured(config, model, split, device) if method == "profile" else (split(1), None)
    if len(layers) < stages:
        raise ConfigError(
            f"pipeline.stages is {stages}; it must be at most {len(layers)}, the layers of this model that can be apart "
            "(embeddings, each block, norm, head)"
        )
    if costs is not None:
        return StageAssignment(layers, partition.balanced(costs, stages), costs)
    if method == "parameters":
        return StageAssignment(layers, partition.balanced([num_parameters(layer) for layer in layers], stages))
    if method == "uniform":
        return StageAssignment(layers, partition.uniform(len(layers), stages))
    return StageAssignment(
        layers, partition.of_type([type_of(layer) for layer in layers], method.removeprefix("type:"), stages)
    )


def _measured(
    config: TuneConfig, model: PreTrainedModel, split: Split, device: torch.device
) -> tuple[list[Layer], list[float]]:
    """Layers and the seconds of each, the head cut into as many pieces as the stages need to be alike."""
    stages = config.pipeline.stages
    most = min(_MOST_PIECES, config.batch.micro * config.data.seq_len)
    whole = split(1)
    costs = _measure(whole, config, model, device)
    pieces = partition.head_pieces(costs, stages, most=most)
    found = {1: costs}
    while pieces > 1 and pieces <= most:  # a piece costs a little more than its share: look before choosing
        layers = split(pieces)
        each, last = _measure([layers[-pieces], layers[-1]], config, model, device)
        found[pieces] = [*costs[:-1], *[each] * (pieces - 1), last]
        if partition.imbalance(found[pieces], partition.balanced(found[pieces], stages)) <= partition.ALIKE:
            break
        pieces *= 2
    pieces = partition.quickest(found, stages)
    return (split(pieces) if pieces > 1 else whole), found[pieces]


def _measure(layers: Sequence[Layer], config: TuneConfig, model: PreTrainedModel, device: torch.device) -> list[float]:
    """Seconds of each layer, the same numbers on every rank.

    All ranks measure at the same time, since at the same time they will compute, and may share a machine's memory.
    """
    size = {
        "micro": config.batch.micro,
        "seq_len": config.data.seq_len,
        "hidden_size": model.config.hidden_size,
        "vocab_size": model.config.vocab_size,
    }
    activations = config.activations
    conditions = {
        **size,
        "layers": [layer.signature for layer in layers],
        # Named and valued as in files of earlier releases, whose runs keep their stages.
        "checkpoint_activations": {"none": False, "device": True}.get(activations.checkpoint, activations.checkpoint),
        **({} if activations.loss_rows is None else {"loss_rows": activations.loss_rows}),
        "device": device.type,
        "dtype": str(model.dtype),
    }
    first = dist.get_rank() == 0
    file = Path(config.run.output) / PROFILE
    costs = torch.zeros(len(layers), dtype=torch.float64, device=device)
    known = recall(file, conditions) if first and config.run.resume == "auto" else None
    if known is not None:
        costs.copy_(torch.tensor(known, dtype=torch.float64))
    dist.broadcast(costs, src=0)
    if not costs.any():
        seconds = measure(layers, **size, device=device, dtype=model.dtype)
        costs.copy_(torch.tensor(seconds, dtype=torch.float64) / dist.get_world_size())
        dist.all_reduce(costs)
        if first and file.parent.is_dir():
            remember(file, conditions, costs.tolist())
    return [float(cost) for cost in costs]


def _summary(layers: Sequence[Layer], whole: Sequence[Layer]) -> str:
    """``embedding, 6 transformer blocks`` and so on; of a head in pieces the share."""
    names = []
    for kind in dict.fromkeys(layer.kind for layer in layers):
        count, total = (sum(layer.kind == kind for layer in some) for some in (layers, whole))
        if kind == "block":
            names.append(f"{count} transformer block{'s' if count > 1 else ''}")
        else:
            names.append(kind if count == total else f"{count}/{total} of the {kind}")
    return ", ".join(names)
