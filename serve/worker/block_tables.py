"""The block tables of the live sequences as one tensor that stays: a step writes only what is new in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve.model.sending import send

_FIRST_ROWS = 16
_FIRST_WIDTH = 16


class BlockTables:
    """One row for each live sequence. Rows are used again; what lies beyond a sequence's blocks means nothing."""

    def __init__(self, device: torch.device) -> None:
        self._table = torch.zeros(_FIRST_ROWS, _FIRST_WIDTH, dtype=torch.int32, device=device)
        self._free = list(reversed(range(_FIRST_ROWS)))
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._blocks: list[int] = []
        """What was told since the last step: block ``i`` belongs in row ``i``, column ``i``."""

    def open(self) -> int:
        """A row for a sequence without blocks."""
        if not self._free:
            rows, width = self._table.shape
            self._grow(2 * rows, width)
            self._free = list(reversed(range(rows, 2 * rows)))
        return self._free.pop()

    def close(self, row: int) -> None:
        """The sequence is forgotten."""
        self._free.append(row)

    def extend(self, row: int, held: int, blocks: Sequence[int]) -> None:
        """A sequence that held ``held`` blocks has these too."""
        self._rows.extend([row] * len(blocks))
        self._columns.extend(range(held, held + len(blocks)))
        self._blocks.extend(blocks)

    def written(self) -> Tensor:
        """int32 [rows, width], with everything that was told. The same tensor as before wherever nothing had to grow."""
        if self._blocks:
            rows, width = self._table.shape
            if (widest := max(self._columns) + 1) > width:
                self._grow(rows, max(2 * width, widest))
            entries_3N = send(torch.tensor([self._rows, self._columns, self._blocks]), self._table.device)
            self._table[entries_3N[0], entries_3N[1]] = entries_3N[2].int()
            self._rows.clear()
            self._columns.clear()
            self._blocks.clear()
        return self._table

    def _grow(self, rows: int, width: int) -> None:
        old = self._table
        self._table = torch.zeros(rows, width, dtype=torch.int32, device=old.device)
        self._table[: old.shape[0], : old.shape[1]] = old
