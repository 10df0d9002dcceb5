"""The inputs of steps that compute one token of each sequence, at the same place in memory in every step of a size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from serve.model.attention import StepLayout
from serve.model.cuda.graphs import size_for

_NUMBERS: Final = 5
"""How many numbers a row has: id, position, slot, row of the block tables, length by which it is computed."""
_NOTHING: Final = (0, -1, -1, 0, 1)
"""The numbers of a row without a sequence."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The inputs of all steps of one size."""

    numbers: Tensor
    """int64 [5, size]"""
    layout: StepLayout
    """``context_lengths`` are the most that there may be; all else is as it should be, a row without a sequence has position
    and slot -1."""

    @property
    def input_ids(self) -> Tensor:
        """The tokens, int64 [1, size]."""
        return self.numbers[:1]

    @property
    def position_ids(self) -> Tensor:
        """Their positions, int64 [1, size], with 0 where there is no sequence: what a model may look up a row of a table by."""
        return self.numbers[1:2].clamp(min=0)


class DecodeInputs:
    """Owns one ``DecodeStep`` of each size, and fills one of them for a step by a single copy from the host."""

    def __init__(
        self, sizes: Sequence[int], max_model_len: int, block_tokens: int, device: torch.device, *, by_length: bool
    ) -> None:
        """
        Args:
            sizes: rows, ascending.
            by_length: whether the model has a ``LengthRule``.
        """
        self._sizes = tuple(sizes)
        self._pinned = device.type == "cuda"
        width = -(-max_model_len // block_tokens)
        self._tables = torch.zeros(sizes[-1], width, dtype=torch.int32, device=device)
        self.steps = {size: self._step(size, width * block_tokens, device, by_length=by_length) for size in sizes}

    def _step(self, size: int, positions: int, device: torch.device, *, by_length: bool) -> DecodeStep:
        numbers = torch.tensor(_NOTHING, dtype=torch.int64)[:, None].repeat(1, size).to(device)
        layout = StepLayout(
            slots=numbers[2],
            positions=torch.full((size,), -1, dtype=torch.int32, device=device),
            query_starts=tuple(range(size + 1)),
            context_lengths=(positions,) * size,
            block_tables=self._tables[:size],
            table_rows=tuple(range(size)),
            lengths=numbers[4] if by_length else None,
        )
        return DecodeStep(numbers, layout)

    def fits(self, rows: int) -> bool:
        """Whether there is a size for so many rows."""
        return 0 < rows <= self._sizes[-1]

    def fill(self, rows: Sequence[tuple[int, int, int, int, int]], block_tables: Tensor) -> DecodeStep:
        """Let the step of the least size that fits compute these rows.

        Args:
            rows: of each sequence the id and the position of its token, its slot, its row of ``block_tables`` and the length
                by which it is computed.
            block_tables: int32 [sequences, any width], on the device.
        """
        size = size_for(self._sizes, len(rows))
        assert size is not None, "the step has more rows than the largest size"
        step = self.steps[size]
        columns = list(zip(*rows, *([_NOTHING] * (size - len(rows))), strict=True))
        # Pinned memory is not used again before the copy is done, which the host does not wait for.
        staged = torch.tensor(columns, dtype=torch.int64, pin_memory=self._pinned)
        step.numbers.copy_(staged, non_blocking=True)
        step.layout.positions.copy_(step.numbers[1])
        width = min(block_tables.shape[1], self._tables.shape[1])
        self._tables[: len(rows), :width] = block_tables.index_select(0, step.numbers[3, : len(rows)])[:, :width]
        return step
