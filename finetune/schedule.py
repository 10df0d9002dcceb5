"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass

from finetune.config import TuneConfig


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up over ``warmup_steps``, then half a cosine down to ``floor * peak`` at step ``steps``."""

    steps: int
    warmup_steps: int
    peak: float
    floor: float

    def rate(self, step: int) -> float:
        """Learning rate of optimizer step ``step``, counted from 0; beyond the last step, the floor."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        decaying = max(1, self.steps - self.warmup_steps - 1)
        progress = min(1.0, (step - self.warmup_steps) / decaying)
        share = self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * share


def make_schedule(config: TuneConfig, num_samples: int) -> Schedule:
    """The schedule of a run whose training data is cut into ``num_samples`` samples."""
    steps = config.schedule.steps
    if steps is None:
        steps = max(1, math.ceil(config.schedule.epochs * num_samples / config.step_samples))
    warmup = config.schedule.warmup
    warmup_steps = int(warmup) if warmup >= 1 else round(warmup * steps)
    return Schedule(steps, min(warmup_steps, steps - 1), config.optimizer.lr, config.schedule.floor)
