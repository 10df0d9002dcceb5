"""Which shapes the attention kernel is compiled with, and how a step is cut into tiles for it. Needs no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

MOST_SPLITS: Final = 16
_PROGRAMS_PER_PROCESSOR: Final = 2
"""What a split of positions aims at: fewer leave multiprocessors idle, more cost a longer sum over the splits."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One way to compile ``kernels.attend``."""

    rows: int
    """M: tokens of a tile times query heads of a key/value head; a power of two."""
    positions: int
    """N, looked at at once."""
    num_warps: int
    num_stages: int


def power_of_two(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(0, number - 1).bit_length()


def shape_of(dtype: torch.dtype, head_dim: int, group: int, *, long: bool, rules: bool) -> Shape:
    """The shape for a phase: one that spills no register on any architecture, which ``tests/serve/model/cuda`` holds.

    Args:
        dtype: of queries; products of fp32 have no tensor cores that keep its precision, and take many registers.
        head_dim: D.
        group: query heads of one key/value head.
        long: spans of many tokens (prefill) rather than one or a few each (decoding).
        rules: scores have a soft-cap or a table of biases, which take registers, too.
    """
    narrow, wide = head_dim <= 64, head_dim > 128
    if dtype == torch.float32:
        least = Shape(16, 16, 4, 3)
    elif not long:
        least = Shape(16, 32 if wide else 64, 8 if narrow else 4, 2)
    elif wide:
        least = Shape(64, 32, 8, 2)
    else:
        least = Shape(128 if narrow and not rules else 64, 64, 8, 2)
    rows = max(least.rows, power_of_two(group))
    return Shape(rows, least.positions, least.num_warps, least.num_stages)


def splits_for(tiles: int, kv_heads: int, processors: int) -> int:
    """Among how many programs a tile's positions are split: a power of two, the same for about as many tiles.

    Args:
        tiles: of one launch, with ``kv_heads`` programs each.
        processors: multiprocessors of the device.
    """
    wanted = _PROGRAMS_PER_PROCESSOR * processors // (power_of_two(tiles) * kv_heads)
    return max(1, min(MOST_SPLITS, power_of_two(wanted + 1) // 2))


def cut(
    query_starts: Sequence[int], table_rows: Sequence[int], short_tokens: int, long_tokens: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """A step's tiles (row of the block table, first token, tokens): of spans of at most ``short_tokens``, and of the others."""
    short: list[tuple[int, int, int]] = []
    long: list[tuple[int, int, int]] = []
    for i, row in enumerate(table_rows):
        first, end = query_starts[i], query_starts[i + 1]
        if end - first <= short_tokens:
            short.append((row, first, end - first))
        else:
            long.extend((row, begin, min(long_tokens, end - begin)) for begin in range(first, end, long_tokens))
    return short, long
