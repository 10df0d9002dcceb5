"""The order of a run's samples, seeded so that any step can find its own, and which rank takes which of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Which sample comes at which position of a run: a new seeded shuffle of all samples in each pass.

    A pure function of the position, so a resumed run needs nothing but the number of samples already taken.
    """

    num_samples: int
    seed: int

    def at(self, first: int, count: int) -> Ids:
        """Indices of the samples at positions [first, first + count)."""
        positions = np.arange(first, first + count, dtype=np.int64)
        passes = positions // self.num_samples
        indices = np.empty(count, dtype=np.int64)
        for number in np.unique(passes):
            here = passes == number
            indices[here] = _shuffled(self.num_samples, self.seed, int(number))[positions[here] % self.num_samples]
        return indices


@lru_cache(maxsize=2)
def _shuffled(num_samples: int, seed: int, number: int) -> Ids:
    return np.random.Generator(np.random.PCG64([seed, number])).permutation(num_samples)


@dataclass(frozen=True, slots=True)
class Share:
    """The part of each step's samples that one rank computes."""

    rank: int
    ranks: int
    micro: int
    accumulation: int

    @property
    def step_samples(self) -> int:
        return self.ranks * self.micro * self.accumulation

    def positions(self, step_first: int) -> list[int]:
        """First position of each of this rank's micro-batches in the step whose samples begin at ``step_first``.

        A step's samples are the same on any number of ranks; only who computes them changes.
        """
        per_round = self.ranks * self.micro
        return [step_first + turn * per_round + self.rank * self.micro for turn in range(self.accumulation)]
