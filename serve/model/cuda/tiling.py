"""Which shapes the attention kernel is compiled with, and how a step is cut into tiles for it. Needs no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

MOST_SPLITS: Final = 32
SHARE_POSITIONS: Final = 256
"""Positions of a sequence that are not worth splitting: fewer cost more to weigh than they gain."""
LEAST_HEAD: Final = 16
"""The least inner size of a product that tensor cores take."""
WRITE_WARPS: Final = 1
"""A program of ``kernels.write_kv`` has so many: it writes one head of one token."""
MOST_REGISTERS: Final = 255
"""A thread can have no more."""
COMBINE_WARPS: Final = 4
"""A program of ``kernels.combine`` has so many."""
_PROGRAMS_PER_PROCESSOR: Final = 2
"""What a split of positions aims at: fewer leave multiprocessors idle, more cost a longer sum over the splits."""

_PROGRAMS_TO_CHOOSE_FROM: Final = 32
"""For each multiprocessor, which has a few at once: with more, the time in which the last ones run out is short enough."""
_POSITIONS_OF_A_PROGRAM: Final = 4096
"""About as many at most: reading them takes one program tens of microseconds, as long as a layer of a large step."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One way to compile ``kernels.attend``."""

    rows: int
    """M, a power of two."""
    heads: int
    """R: query heads of one key/value head that a program takes."""
    positions: int
    """N, looked at at once."""
    num_warps: int
    num_stages: int
    most_registers: int | None = None
    """A thread may have so many; ``None`` lets ptxas spill a few where room for one program more is made by that."""

    @property
    def tokens(self) -> int:
        """How many tokens a tile may have."""
        return self.rows // self.heads


def power_of_two(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(0, number - 1).bit_length()


def padded_head(head_dim: int) -> int:
    """D2, the head size that is computed with."""
    return max(LEAST_HEAD, power_of_two(head_dim))


def shape_of(
    dtype: torch.dtype, head_dim: int, group: int, *, long: bool, capped: bool = False, biased: bool = False, fp8: bool = False
) -> Shape:
    """The shape for a phase: one that spills no register on any architecture in what ``tests/serve/model/cuda`` compiles.

    Args:
        dtype: of queries; products of fp32 have no tensor cores that keep its precision, and take many registers.
        head_dim: D.
        group: query heads of one key/value head.
        long: spans of many tokens (prefill) rather than one or a few each (decoding).
        capped, biased: scores have a soft-cap or a table of biases, which take registers, too; a window and sinks take few.
        fp8: keys and values are kept in 8 bits, and widened in registers.
    """
    wide, rules, most_registers = head_dim > 128, capped or biased, None
    if dtype == torch.float32:
        rows, positions, most_registers = 16, 16, MOST_REGISTERS
        num_warps, num_stages = (4, 2) if head_dim == 128 else (8 if head_dim > 64 else 4, 3)
    elif not long and fp8:
        rows, positions, most_registers = 16, 32, MOST_REGISTERS if wide else None
        num_warps, num_stages = (8, 2) if 64 < head_dim <= 128 and not rules else (4, 3)
    elif not long:
        rows, positions, most_registers = 16, 32, MOST_REGISTERS if wide and biased else None
        num_warps, num_stages = (8, 2) if wide else (4, 3)
    elif wide:
        rows, positions, num_warps, num_stages = 64, 32, 8, 3
    else:
        rows, positions, num_warps = 128 if 32 < head_dim <= 64 and not rules else 64, 64, 8
        num_stages = 2 if head_dim <= 32 or (fp8 and head_dim <= 64 and not rules) else 3
    heads = _heads_of_a_program(group, rows, long=long)
    return Shape(rows, heads, positions, num_warps, num_stages, most_registers)


def precision_of(dtype: torch.dtype) -> str:
    """How products of this type are computed, in Triton's words."""
    return "ieee" if dtype == torch.float32 else "tf32"


def _heads_of_a_program(group: int, rows: int, *, long: bool) -> int:
    """All heads of a group where they fit; else, or where a tile of many tokens would leave over an eighth idle, a part."""
    parts = -(-group // rows)
    while long and 8 * (rows // -(-group // parts)) * group < 7 * rows * parts:
        parts += 1
    return -(-group // parts)


def splits_for(programs: int, processors: int) -> int:
    """Among how many programs the positions of a long sequence are split in decoding: a power of two.

    The same whatever else is in a step, so that what a sequence computes does not depend on its neighbours.

    Args:
        programs: that each tile has without splits: key/value heads times the parts of their groups.
        processors: multiprocessors of the device.
    """
    wanted = _PROGRAMS_PER_PROCESSOR * processors // programs
    return max(1, min(MOST_SPLITS, power_of_two(wanted + 1) // 2))


def programs_for(splits: int, others: int, processors: int, longest: int) -> int:
    """How many programs compute the splits of a tile and a key/value head, some of them one after the other: a power of two.

    All in a small step. In a large one there are programs enough without, and of short sequences most would find nothing to
    do: but none shall take a sequence's whole length where that is long. What is computed is the same, whatever the number.

    Args:
        others: programs of the step, if each computed all splits.
        processors: multiprocessors of the device.
        longest: positions that a sequence of the step may have.
    """
    wanted = max(_PROGRAMS_TO_CHOOSE_FROM * processors // others, -(-longest // _POSITIONS_OF_A_PROGRAM))
    return max(1, min(splits, power_of_two(wanted + 1) // 2))


Tile = tuple[int, int, int, int]
"""Row of its sequence's block table, first token, number of tokens, and the number of those of all short tiles before it."""


def cut(
    query_starts: Sequence[int], table_rows: Sequence[int], short_tokens: int, long_tokens: int
) -> tuple[list[Tile], list[Tile]]:
    """A step's tiles: of spans of at most ``short_tokens``, one each, and of the others."""
    short: list[Tile] = []
    long: list[Tile] = []
    before = 0
    for i, row in enumerate(table_rows):
        first, end = query_starts[i], query_starts[i + 1]
        if end - first <= short_tokens:
            short.append((row, first, end - first, before))
            before += end - first
        else:
            long.extend((row, begin, min(long_tokens, end - begin), 0) for begin in range(first, end, long_tokens))
    return short, long
