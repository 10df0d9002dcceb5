"""What the ranks are seen to be like from outside, for the metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from serve.metrics import Metrics
from serve.runtime.gpu_figures import GpuWatch
from serve.runtime.seams import RankGroup

LOOK_SECONDS: Final = 5.0
"""Between two looks at the ranks' memory, and at their GPUs."""


class RankFigures:
    """Tells the metrics of ranks that serve. Called by one thread at a time."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._gpus = GpuWatch(metrics.gpus)
        self._looked: tuple[RankGroup, float] | None = None

    def tell(self, group: RankGroup) -> None:
        """How long ago each was heard of; from time to time, and of a new group at once, what memory it has."""
        self._metrics.heartbeat_ages(group.heartbeat_ages())
        now = self._clock()
        if self._looked is None or self._looked[0] is not group or now - self._looked[1] >= LOOK_SECONDS:
            self._looked = group, now
            self._metrics.ranks.memory(group.memory())
            self._gpus.look()
