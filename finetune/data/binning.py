"""Samples of many lengths into rows of one length: best fit, longest first, within windows of the order they come in."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
WINDOW = 8192
"""Samples packed together: enough for rows to fill, few enough that neighbours of a row come from all over the data."""


def pack(sizes: Numbers, capacity: int, window: int = WINDOW) -> tuple[Numbers, Numbers]:
    """Share ``sizes`` out over rows of ``capacity``, none of which may be larger.

    Returns:
        All samples in the order of the rows, and where each row begins in it (and, last, where the rows end).
    """
    assert not len(sizes) or int(sizes.max()) <= capacity, "a sample that fits no row is cut, dropped or refused before"
    members: list[list[int]] = []
    for first in range(0, len(sizes), window):
        block = sizes[first : first + window]
        members += _best_fit(block.tolist(), np.argsort(-block, kind="stable").tolist(), capacity, first)
    order = np.fromiter((sample for row in members for sample in row), np.int64, len(sizes))
    return order, np.cumsum([0, *map(len, members)], dtype=np.int64)


def _best_fit(sizes: list[int], order: list[int], capacity: int, first: int) -> list[list[int]]:
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room left, row; sorted
    for sample in order:
        at = bisect_left(free, (sizes[sample], -1))
        if at < len(free):
            room, row = free.pop(at)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(first + sample)
        if room > sizes[sample]:
            insort(free, (room - sizes[sample], row))
    return rows
