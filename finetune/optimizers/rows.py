"""Rows of matrices that are updated apart from the rest of a flat tensor, for ``finetune.optimizers.algorithms.zenflow``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch.optim.adamw import adamw

from finetune.optimizers.fragments import Piece

_MANY_UPDATES: Final = 1e9

# Shapes.  r, c rows and columns of a piece of a matrix   K all chosen rows of pieces with as many columns


class Room:
    """Memory for what is used up at once: new memory costs more than what is computed in it."""

    def __init__(self) -> None:
        self._memory = (torch.empty(0), torch.empty(0))

    def two_like(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors as large as a given one, with anything in them, until the next call."""
        if self._memory[0].numel() < tensor.numel():
            self._memory = (tensor.new_empty(tensor.numel()), tensor.new_empty(tensor.numel()))
        first, second = (memory[: tensor.numel()].view_as(tensor) for memory in self._memory)
        return first, second


class ChosenRows:
    """Weights and moments of chosen rows, copied out of one flat tensor so that the rest can be updated beside them.

    Pieces that are equally wide lie together: a few large updates cost less than one for each matrix.
    """

    def __init__(
        self,
        pieces: Iterable[tuple[Piece, torch.Tensor, torch.Tensor]],
        weights: torch.Tensor,
        state: Mapping[str, torch.Tensor],
    ) -> None:
        """Copy them.

        Args:
            pieces: equally wide; of each the chosen rows, at least one, and how often these were updated.
            weights: the flat tensor.
            state: AdamW's moments of it.
        """
        self._places: list[tuple[Piece, torch.Tensor, slice]] = []
        updates, start = [], 0
        for piece, rows, updated in pieces:
            self._places.append((piece, rows, slice(start, start + len(rows))))
            updates.append(updated)
            start += len(rows)
        self._updates_K = torch.cat(updates)
        self._moments = {key: self._copied(state[key]) for key in ("exp_avg", "exp_avg_sq")}
        self._weight_Kc = self._copied(weights)

    def update(self, settings: Mapping[str, Any], weights: torch.Tensor, gradient: torch.Tensor, room: Room) -> None:
        """One update of AdamW, in these copies and in the flat weights."""
        self._updates_K += 1.0
        gradient_Kc, change_Kc = room.two_like(self._weight_Kc)
        for piece, rows, part in self._places:
            torch.index_select(piece.of(gradient), 0, rows, out=gradient_Kc[part])
        first_Kc, second_Kc = self._moments["exp_avg"], self._moments["exp_avg_sq"]
        adam_by_rows(settings, gradient_Kc, first_Kc, second_Kc, self._updates_K, change_Kc)
        self._weight_Kc.mul_(1.0 - settings["lr"] * settings["weight_decay"]).sub_(change_Kc)
        self._copy_back(weights, self._weight_Kc)

    def put_back(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy the moments to where they came from; the weights are there."""
        for key, values_Kc in self._moments.items():
            self._copy_back(state[key], values_Kc)

    def _copied(self, flat: torch.Tensor) -> torch.Tensor:
        return torch.cat([piece.of(flat).index_select(0, rows) for piece, rows, _ in self._places])

    def _copy_back(self, flat: torch.Tensor, values_Kc: torch.Tensor) -> None:
        for piece, rows, part in self._places:
            piece.of(flat).index_copy_(0, rows, values_Kc[part])


def adam_by_rows(
    settings: Mapping[str, Any],
    gradient_rc: torch.Tensor,
    first_rc: torch.Tensor,
    second_rc: torch.Tensor,
    updates_r: torch.Tensor,
    out_rc: torch.Tensor,
    *,
    summed: int = 1,
) -> None:
    """Move the moments, and put into ``out_rc`` what Adam subtracts from the weights.

    Adam in the form with its corrections in the rate (arXiv 1412.6980, end of section 2), which a row then has of its own:
    torch's fused kernel, which goes over the memory once, is told of so many updates that it corrects nothing.

    Args:
        updates_r: of the moments of each row, this one counted.
        summed: gradients that have been added up; their mean counts, and takes the place of the sum.
    """
    (first_beta, second_beta), counted_r1 = settings["betas"], updates_r.double().unsqueeze(1)
    adamw(
        [out_rc.zero_()],
        [gradient_rc],
        [first_rc],
        [second_rc],
        [],
        [torch.tensor(_MANY_UPDATES)],
        fused=True,
        amsgrad=False,
        beta1=first_beta,
        beta2=second_beta,
        lr=1.0,
        weight_decay=0.0,
        eps=settings["eps"],
        maximize=False,
        grad_scale=torch.tensor(float(summed)) if summed > 1 else None,
    )
    rate_r1 = settings["lr"] * (1.0 - second_beta**counted_r1).sqrt() / (1.0 - first_beta**counted_r1)
    out_rc.mul_(-rate_r1.float())
