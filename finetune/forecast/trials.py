"""Small runs of a run's own engine, and the prices that their steps let work out: what a step costs besides its computing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, Final

import numpy as np

from finetune.config import (
    ActivationConfig,
    BatchConfig,
    EvalConfig,
    ModelConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainTokenizerConfig,
    TuneConfig,
)

_SHAPES: Final[tuple[tuple[Mapping[str, int], int, int], ...]] = (
    # A usual one; many small tensors; few large ones; much computed with few weights.
    ({"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 2048}, 2, 256),
    ({"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 10, "vocab_size": 512}, 1, 32),
    ({"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "vocab_size": 4096}, 1, 16),
    ({"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 3, "vocab_size": 1024}, 2, 512),
)
"""Model, micro-batch, length."""
_ACCUMULATIONS: Final = (1, 3)
"""What a micro-batch costs is told from what a step costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the processes that measure are told, as JSON."""

    config: TuneConfig
    """The run whose machine and engine are measured."""
    command: str
    precision: str
    libraries: dict[str, str]
    """Built libraries that the run would load, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a run's engine costs one rank in each step, in seconds, besides what its model computes."""

    computing: float
    """What a model's computing takes inside a run, as a multiple of the sum of its parts: waiting for other ranks and for
    memory, Python between the parts."""
    micro_tensor: float
    """Seconds for each tensor with a gradient, in each micro-batch: hooks, copies, messages."""
    micro_element: float
    """For each element of them."""
    step_tensor: float
    """Seconds for each tensor once a step: norms, the update, weights that are sent back."""
    step_element: float


@dataclass(frozen=True, slots=True)
class Trial:
    """Steps of one small run: what they are made of, and what they took."""

    computed: float
    """Seconds of computing by the machine's speeds, those of all micro-batches of a step."""
    accumulation: int
    tensors: float
    elements: float
    seconds: float
    """Measured, of a step."""

    @property
    def amounts(self) -> tuple[float, ...]:
        """What each price is paid for, in their order."""
        micro = self.accumulation
        return self.computed, micro * self.tensors, micro * self.elements, self.tensors, self.elements


def trials_of(config: TuneConfig) -> list[TuneConfig]:
    """Small runs of new models with the engine of ``config``: its ranks, stages, offload, precision and optimizer."""
    found = []
    for shape, micro, length in _SHAPES:
        model: dict[str, Any] = {"model_type": "llama", "num_attention_heads": shape["hidden_size"] // 64, **shape}
        model["num_hidden_layers"] = max(model["num_hidden_layers"], config.pipeline.stages)
        found += [
            dataclasses.replace(
                config,
                model=ModelConfig(new=model),
                tokenizer=TokenizerConfig(train=TrainTokenizerConfig(vocab_size=512)),
                lora=None,
                data=dataclasses.replace(config.data, seq_len=length, packing="join"),
                batch=BatchConfig(micro=micro, accumulation=accumulation),
                optimizer=dataclasses.replace(config.optimizer, lr=1e-6),
                schedule=ScheduleConfig(),
                activations=ActivationConfig(),
                eval=EvalConfig(),
            )
            for accumulation in _ACCUMULATIONS
        ]
    return found


def prices_of(trials: Sequence[Trial]) -> Prices:
    """The prices that come nearest to what was measured, none below nothing; each trial counts the same.

    That computing takes the sum of its parts counts as one trial more, or what hooks cost in small models would be taken for a
    share of the computing where the two grow alike.
    """
    rows = np.array([[*t.amounts, t.seconds] for t in trials])
    rows = np.vstack([rows[:, :-1] / rows[:, -1:], [1.0, 0.0, 0.0, 0.0, 0.0]])
    scales = rows.max(axis=0)
    best, best_error = np.zeros(rows.shape[1]), float("inf")
    columns = range(rows.shape[1])
    for chosen in chain.from_iterable(combinations(columns, size) for size in range(1, len(columns) + 1)):
        # Least squares without negative prices: the best of all subsets whose solution has none.
        part = (rows / scales)[:, chosen]
        found, *_ = np.linalg.lstsq(part, np.ones(len(rows)), rcond=None)
        error = float(((part @ found - 1) ** 2).sum())
        if (found >= 0).all() and error < best_error - 1e-12:
            best, best_error = np.zeros(rows.shape[1]), error
            best[list(chosen)] = found
    return Prices(**dict(zip((f.name for f in dataclasses.fields(Prices)), (best / scales).tolist(), strict=True)))
