"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from finetune.config import TuneConfig
from finetune.train.position import RunPosition


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up over ``warmup_steps``, then a shape that ends at ``floor * peak`` at the last of ``steps``.

    Shapes: ``constant`` (the floor plays no part), ``linear``, ``cosine`` (half a period), ``wsd`` (constant, then a linear
    fall over the last ``decay_steps``), ``inverse_sqrt`` (peak * sqrt(warm-up / step), never below the floor).
    """

    steps: int
    warmup_steps: int
    peak: float
    floor: float
    shape: str = "cosine"
    decay_steps: int = 0
    """How many of the last steps the rate falls in; for ``wsd`` alone."""

    def rate(self, step: int) -> float:
        """Learning rate of optimizer step ``step``, counted from 0; beyond the last step, that of the last one."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        return self.peak * _SHAPES[self.shape](self, min(step, self.steps - 1))

    def _progress(self, step: int) -> float:
        """0 at the first step after warm-up, 1 at the last."""
        return min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps - 1))

    def _between(self, share: float) -> float:
        """From 1 at a share of 1 down to the floor at 0."""
        return self.floor + (1.0 - self.floor) * share

    def _linear(self, step: int) -> float:
        return self._between(1.0 - self._progress(step))

    def _cosine(self, step: int) -> float:
        return self._between(0.5 * (1.0 + math.cos(math.pi * self._progress(step))))

    def _wsd(self, step: int) -> float:
        left = self.steps - 1 - step
        return 1.0 if self.decay_steps == 0 else self._between(min(1.0, left / self.decay_steps))

    def _inverse_sqrt(self, step: int) -> float:
        return max(self.floor, math.sqrt(max(1, self.warmup_steps) / (step + 1)))


_SHAPES: Final[Mapping[str, Callable[[Schedule, int], float]]] = {
    "constant": lambda schedule, step: 1.0,
    "linear": Schedule._linear,
    "cosine": Schedule._cosine,
    "wsd": Schedule._wsd,
    "inverse_sqrt": Schedule._inverse_sqrt,
}


def make_schedule(config: TuneConfig, num_samples: int, done: RunPosition | None = None) -> Schedule:
    """The schedule of a run whose training data is cut into ``num_samples`` samples; ``optimizer.lr`` must be set.

    Args:
        done: how far a resumed run has come, perhaps in steps of another size: ``schedule.epochs`` counts samples.
    """
    wanted, peak = config.schedule, config.optimizer.lr
    assert peak is not None, "a run settles its learning rate first, see finetune.config.learning_rate"
    steps = wanted.steps
    if steps is None:
        taken, before = (0, 0) if done is None else (done.samples, done.step)
        steps = max(1, before + math.ceil(max(0.0, wanted.epochs * num_samples - taken) / config.step_samples))
    warmup_steps = min(_steps_of(wanted.warmup, steps), steps - 1)
    decay_steps = min(_steps_of(wanted.decay, steps), steps - 1 - warmup_steps)
    return Schedule(steps, warmup_steps, peak, wanted.floor, wanted.shape, max(0, decay_steps))


def _steps_of(wanted: float, steps: int) -> int:
    """Below 1 a share of all steps, from 1 on a number of steps."""
    return int(wanted) if wanted >= 1 else round(wanted * steps)
