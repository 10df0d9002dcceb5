"""Token streams on disk, cut into samples of equal length without padding, in a seeded order that any step can find.

S samples of the stream   L = seq_len   sample i holds tokens [i * L, i * L + L] of the stream: L inputs, and the same
shifted by one as targets, so every token is a target exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class TokenStream:
    """A file of token ids, memory-mapped: nothing is read before it is asked for."""

    def __init__(self, path: Path, dtype: str, seq_len: int) -> None:
        self._tokens = np.memmap(path, dtype=np.dtype(dtype), mode="r") if path.stat().st_size else np.zeros(0, dtype)
        self._seq_len = seq_len

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_samples(self) -> int:
        """Whole samples; the tail that does not fill one is not among them."""
        return max(0, (len(self._tokens) - 1) // self._seq_len)

    def samples(self, indices: Ids) -> tuple[Ids, Ids]:
        """Inputs and targets of whole samples, each [len(indices), L]."""
        starts = np.asarray(indices, dtype=np.int64) * self._seq_len
        offsets = np.arange(self._seq_len + 1, dtype=np.int64)
        rows = self._tokens[starts[:, None] + offsets[None, :]].astype(np.int64)
        return rows[:, :-1], rows[:, 1:]

    def tail(self) -> tuple[Ids, Ids]:
        """Inputs and targets, each [1, shorter than L], after the last whole sample; empty when nothing is left."""
        rest = self._tokens[self.num_samples * self._seq_len :].astype(np.int64)
        return rest[None, :-1], rest[None, 1:]


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
