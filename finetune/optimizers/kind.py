"""What an optimizer declares of itself, for all who deal with optimizers.

A new one is one more file in ``algorithms/``: ``optimizer.name`` may be the name of that file, and ``KIND`` in it is found by
``kinds.py``. Of some, what they declare is repeated where torch is not imported, so that a run that cannot be is refused
earlier: how much they keep in ``forecast/least.py``, that they take no disks in ``config/whole.py``; tests hold both to this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from finetune.config import TuneConfig

Groups = list[dict[str, Any]]
"""Parameter groups as torch's optimizers take them: ``params``, and ``weight_decay`` of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSizes:
    """What one rank updates in a step, in elements."""

    share: int
    """All its weights."""
    group: int
    """Its part of the largest group of parameters that are updated at once."""
    others: int
    """Its part of those that are no matrices."""
    parameter: int
    """The largest parameter, whole."""
    matrix: int
    """The largest matrix, whole; 0 without any."""
    matrix_part: int
    """What this rank may hold of it."""
    flat: bool
    """Whether parameters are laid end to end (ZeRO) rather than updated one by one."""
    chosen: float
    """Share of a matrix's rows that are updated apart (``offload.zenflow.share``)."""


class Make(Protocol):
    """Builds the optimizer of a run."""

    def __call__(self, config: TuneConfig, groups: Groups, matrices: frozenset[str]) -> torch.optim.Optimizer:
        """``matrices`` are the names of the parameters that it treats as matrices."""
        ...


def _nothing(sizes: UpdateSizes) -> int:
    return 0


def two_of_a_group(sizes: UpdateSizes) -> int:
    """Bytes of two fp32 numbers for each weight that is updated at once, as torch computes element by element."""
    return 8 * (sizes.group if sizes.flat else min(sizes.share, sizes.parameter))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """An optimizer: how it is made, what it keeps, and what it needs while it updates."""

    make: Make
    state: tuple[str, ...]
    """Keys of what it keeps of each parameter, fp32 tensors as large as that."""
    matrix_state: tuple[str, ...] | None = None
    """``state`` of a matrix, for an optimizer that treats matrices in its own way; ``None``: it works element by element."""
    whole_state: Mapping[str, int] = field(default_factory=dict)
    """What it keeps of a matrix that every rank has all of: a key, and the dimension of the matrix that it is as long as."""
    tables_are_matrices: bool = True
    """Whether embeddings and the output layer, whose rows belong to single tokens, are matrices to it."""
    scratch: Callable[[UpdateSizes], int] = _nothing
    """Bytes it computes with besides, where its state lies."""
    device_scratch: Callable[[UpdateSizes], int] = _nothing
    """Bytes it computes with besides where the ranks communicate, wherever its state lies."""
    products: int = 0
    """Operations of products of whole matrices in a step, for each element of a matrix, over its shorter side."""

    def keys_of(self, *, matrix: bool) -> tuple[str, ...]:
        """Keys of what it keeps of a parameter."""
        return self.matrix_state if matrix and self.matrix_state is not None else self.state


def rate_of(config: TuneConfig) -> float:
    """The learning rate after warm-up, which is settled before anything is built."""
    assert config.optimizer.lr is not None, "the learning rate is settled before anything is built"
    return config.optimizer.lr


def betas_of(config: TuneConfig) -> tuple[float, float]:
    """The two numbers of ``optimizer.betas``, whose count the configuration has checked."""
    first, second = config.optimizer.betas
    return first, second
