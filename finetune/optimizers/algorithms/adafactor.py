"""Adafactor: a second moment kept as one factor for the rows and one for the columns of each matrix (arXiv 1804.04235)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from finetune.config import TuneConfig
from finetune.distributed import Peers
from finetune.optimizers.base import ShardedOptimizer
from finetune.optimizers.fragments import Fragment, Fragments
from finetune.optimizers.kind import Groups, OptimizerKind, rate_of

_Direction = Callable[[Fragment], torch.Tensor]
FACTORS: Final = ("exp_avg_sq_row", "exp_avg_sq_col")
"""What is kept whole of a matrix: one number for each row, and one for each column."""
_DECAY: Final = 0.8
_SMALLEST: Final = 1e-30
_LARGEST_RMS: Final = 1.0

# Shapes.  R rows and C columns of a matrix, its factors R and C   r of its rows that a fragment touches


class Adafactor(ShardedOptimizer):
    """Shazeer and Stern, 2018, with the learning rate from outside, decoupled weight decay and no first moment.

    After t updates the moment's decay is 1 - t^-0.8. The squared gradient's mean over each row and over each column, 1e-30
    added, make a matrix's second moment: row_R x col_C / mean(row_R). An update whose root mean square over the whole tensor
    is above 1 is scaled down to 1. Other tensors keep the whole second moment.

    The two factors are equal on all peers. They need one reduction of all matrices of a flat tensor together, the lengths of
    the updates another one of a number for each tensor. Updates are computed twice rather than kept in between.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, matrices: frozenset[str], lr: float) -> None:
        super().__init__(groups, {"lr": lr}, matrices=matrices)

    def place(self, layout: Mapping[torch.Tensor, Fragments], device: torch.device, peers: Peers) -> None:
        super().place(layout, device, peers)
        for flat, fragments in layout.items():
            for fragment in fragments if self._holds_matrices(fragments) else ():
                for key, size in zip(FACTORS, fragment.shape, strict=True):
                    self.whole[f"{key}.{fragment.name}"] = torch.zeros(size, dtype=torch.float32, device=flat.device)

    def _update_matrices(
        self, group: Mapping[str, Any], flat: torch.Tensor, state: dict[str, Any], fragments: Fragments
    ) -> None:
        gradient = flat.grad
        assert gradient is not None
        self._learn_factors(gradient, fragments, state["step"] ** -_DECAY)

        def direction(fragment: Fragment) -> torch.Tensor:
            row_R, col_C = self._factors(fragment)
            rows, matrix_rC, held = in_rows(fragment, fragment.of(gradient))
            matrix_rC.mul_((row_R[rows] / row_R.mean()).rsqrt_().unsqueeze(1)).mul_(col_C.rsqrt())
            return held

        self._apply(group, flat, fragments, direction)

    def _learn_factors(self, gradient: torch.Tensor, fragments: Fragments, share: float) -> None:
        """Move the factors towards the squared gradient by ``share``."""
        sums: list[torch.Tensor] = []
        for fragment in fragments:
            rows, matrix_rC, _ = in_rows(fragment, fragment.of(gradient))
            squares_rC = matrix_rC.square_()
            row_R = gradient.new_zeros(fragment.shape[0])
            row_R[rows] = squares_rC.sum(1)
            sums += [row_R, squares_rC.sum(0)]
        totals = iter(torch.split(self._sum_over_peers(torch.cat(sums)), [len(one) for one in sums]))
        for fragment in fragments:
            row_R, col_C = self._factors(fragment)
            row_R.lerp_(next(totals) / len(col_C) + _SMALLEST, share)
            col_C.lerp_(next(totals) / len(row_R) + _SMALLEST, share)

    def _factors(self, fragment: Fragment) -> tuple[torch.Tensor, torch.Tensor]:
        row_R, col_C = (self.whole[f"{key}.{fragment.name}"] for key in FACTORS)
        return row_R, col_C

    def _update_others(self, group: Mapping[str, Any], flat: torch.Tensor, state: dict[str, Any], fragments: Fragments) -> None:
        gradient, second = flat.grad, state["exp_avg_sq"]
        assert gradient is not None
        second.lerp_(gradient.square().add_(_SMALLEST), state["step"] ** -_DECAY)
        self._apply(group, flat, fragments, lambda fragment: fragment.of(gradient) * fragment.of(second).rsqrt())

    def _apply(self, group: Mapping[str, Any], flat: torch.Tensor, fragments: Fragments, direction: _Direction) -> None:
        """Decay, and subtract ``direction(fragment)`` from each fragment, scaled down where the whole tensor's is too long."""
        squares = self._sum_over_peers(torch.stack([direction(fragment).square().sum() for fragment in fragments]))
        for fragment, square in zip(fragments, squares.tolist(), strict=True):
            rms = (square / torch.Size(fragment.shape).numel()) ** 0.5
            rate = group["lr"] / max(1.0, rms / _LARGEST_RMS)
            fragment.of(flat).mul_(1.0 - group["lr"] * group["weight_decay"]).sub_(direction(fragment), alpha=rate)


def in_rows(fragment: Fragment, values: torch.Tensor) -> tuple[slice, torch.Tensor, torch.Tensor]:
    """A copy of ``values`` as the rows of the matrix they lie in, with zeros where other ranks hold the rest of a row.

    Returns:
        Which rows of the matrix; those rows (r, C); of the same memory the values alone.
    """
    columns = fragment.shape[1]
    first, last = fragment.start // columns, -(-(fragment.start + fragment.count) // columns)
    rows_rC = values.new_zeros(last - first, columns)
    held = rows_rC.view(-1).narrow(0, fragment.start - first * columns if fragment.count else 0, fragment.count)
    held.copy_(values)
    return slice(first, last), rows_rC, held


def make_adafactor(config: TuneConfig, groups: Groups, matrices: frozenset[str]) -> torch.optim.Optimizer:
    """Build a run's Adafactor; of ``optimizer`` in the configuration it takes ``lr`` alone."""
    return Adafactor(groups, matrices=matrices, lr=rate_of(config))


KIND = OptimizerKind(
    make=make_adafactor,
    state=("exp_avg_sq",),
    matrix_state=(),
    whole_state={key: dimension for dimension, key in enumerate(FACTORS)},
    scratch=lambda sizes: 8 * min(sizes.share, sizes.matrix),
)
