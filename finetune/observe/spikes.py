"""The watch for sudden rises of the loss: a pure function of the losses, so every rank comes to the same verdict."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import Final

from finetune.config import SpikeConfig

_SCALE: Final = 1.4826
"""Median absolute deviation of a normal distribution to its standard deviation."""
_LEAST_SHARE: Final = 0.01
"""A deviation is never less than this share of the median: a loss that hardly moves has no spikes of rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A loss that rose and stayed up for as many steps as the configuration asks for."""

    first_step: int
    """The first of them; a save before it is good."""
    step: int
    loss: float
    usual: float
    """Median of the window before."""

    def __str__(self) -> str:
        return f"the loss rose to {self.loss:.4f} at steps {self.first_step} to {self.step}, from {self.usual:.4f} usually"


class SpikeWatch:
    """Compares each loss with the window of those before it."""

    def __init__(self, config: SpikeConfig) -> None:
        self._config = config
        self._window: deque[float] = deque(maxlen=config.window)
        self._above: list[tuple[int, float]] = []
        self._told = False

    def see(self, step: int, loss: float) -> Spike | None:
        """Take one finite loss; returns a spike once, in the step that makes it one.

        Losses above the bound wait outside the window until they fall back or have become a spike; after that they are what
        is usual, so a new level is told once.
        """
        config = self._config
        if config.action == "off":
            return None
        if not self._is_above(loss):
            self._window.extend(seen for _, seen in self._above)
            self._window.append(loss)
            self._above, self._told = [], False
            return None
        self._above.append((step, loss))
        if len(self._above) >= config.window:  # a new level
            self._window.extend(seen for _, seen in self._above)
            self._above, self._told = [], False
            return None
        if self._told or len(self._above) < config.steps:
            return None
        self._told = True
        usual = statistics.median(self._window)
        return Spike(first_step=self._above[0][0], step=step, loss=max(seen for _, seen in self._above), usual=usual)

    def _is_above(self, loss: float) -> bool:
        if len(self._window) < max(2, self._config.window // 2):
            return False
        median = statistics.median(self._window)
        deviation = _SCALE * statistics.median(abs(seen - median) for seen in self._window)
        return loss > median + self._config.deviations * max(deviation, _LEAST_SHARE * abs(median))
