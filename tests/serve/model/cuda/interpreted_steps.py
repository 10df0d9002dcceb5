"""The Triton back end on the inputs of captured steps, which are the same tensors in every step: for rows with and without a
sequence. It computes with them as a replay does: by what they hold, and by tiles that were cut once.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from serve.model.attention import LayerCache, StepLayout, TorchBackend
from serve.model.cuda.backend import TritonBackend
from serve.worker.decode_inputs import DecodeInputs
from tests.serve.model.cuda.cases import Case
from tests.serve.model.cuda.interpreted import rules_of

SIZE = 4
MOST = 320
"""Positions that a sequence may have: more than a share, so that steps are split."""
LENGTHS = ((5, 300, 17, 256), (301, 1), (290, 31, 64), (18,))
"""Positions of each sequence of one step after the other; rows that are left over have none."""


def compare_steps(case: Case) -> dict[str, float | bool]:
    """The largest difference from plain torch in any step, and whether every row without a sequence is 0."""
    torch.manual_seed(5)
    blocks = SIZE * MOST // case.block_tokens
    cache = LayerCache(
        keys=torch.randn(blocks, case.kv_heads, case.block_tokens, case.head_dim).transpose(2, 3),
        values=torch.randn(blocks, case.kv_heads, case.block_tokens, case.head_dim),
    )
    tables = torch.randperm(blocks, dtype=torch.int32).view(SIZE, -1)
    inputs = DecodeInputs((SIZE,), MOST, case.block_tokens, torch.device("cpu"), by_length=False)
    backend = TritonBackend(8)
    rules, furthest, is_zero, cut_anew = rules_of(case, MOST, "cpu"), 0.0, True, set[int]()
    for lengths in LENGTHS:
        slots = [slot_of(tables[row], length - 1, case.block_tokens) for row, length in enumerate(lengths)]
        rows = [(0, length - 1, slot, row, 1) for row, (length, slot) in enumerate(zip(lengths, slots, strict=True))]
        step = inputs.fill(rows, tables)
        query, key, value = (torch.randn(SIZE, heads, case.head_dim) for heads in (case.heads, case.kv_heads, case.kv_heads))
        query[len(rows) :], key[len(rows) :] = math.nan, math.nan  # what a row without a sequence has is nobody's
        twin = LayerCache(keys=cache.keys.clone(), values=cache.values.clone())
        told = {"scale": 0.2, "window": case.window, "rules": rules}
        out = backend.attend(query, key, value, cache, step.layout, **told)
        cut_anew.add(id(next(iter(step.layout.made.values()))))
        real = slice(0, len(rows))
        expected = TorchBackend().attend(query[real], key[real], value[real], twin, _layout_of(step.layout, lengths), **told)
        furthest = max(furthest, float((out[real] - expected).abs().max()))
        is_zero &= bool((out[len(rows) :] == 0).all())
        assert torch.equal(cache.keys, twin.keys), "rows without a sequence write nothing"
    assert len(cut_anew) == 1
    return {"difference": furthest, "rows without a sequence are 0": is_zero}


def slot_of(table: Tensor, position: int, block_tokens: int) -> int:
    """Where a position of a sequence lies."""
    return int(table[position // block_tokens]) * block_tokens + position % block_tokens


def _layout_of(layout: StepLayout, lengths: tuple[int, ...]) -> StepLayout:
    count = len(lengths)
    return replace(
        layout,
        slots=layout.slots[:count],
        positions=layout.positions[:count],
        query_starts=tuple(range(count + 1)),
        context_lengths=lengths,
        table_rows=layout.table_rows[:count],
    )
