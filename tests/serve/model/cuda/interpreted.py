"""The Triton kernels under Triton's interpreter beside plain torch, on the CPU.

``TRITON_INTERPRET=1 python -m tests.serve.model.cuda.interpreted`` prints a JSON object: by case, the largest difference of
outputs, and whether the caches hold the same bits. A process of its own, since Triton decides when the kernels are imported
whether they are interpreted.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import torch
from torch import Tensor

from serve.model.attention import PLAIN, LayerCache, ScoreRules, StepLayout, TorchBackend
from serve.model.cuda.backend import TritonBackend
from tests.serve.model.cuda.cases import CASES, Case


def compare(case: Case) -> dict[str, float | bool]:
    """One case by both back ends."""
    torch.manual_seed(5)
    random.seed(5)
    layout, blocks = _lay_out(case)
    shape = (len(blocks) + 4, case.kv_heads)
    cache = LayerCache(
        keys=torch.randn(*shape, case.head_dim, case.block_tokens).to(case.dtype),
        values=torch.randn(*shape, case.block_tokens, case.head_dim).to(case.dtype),
    )
    _poison(cache, case, layout, blocks)
    twin = LayerCache(keys=cache.keys.clone(), values=cache.values.clone())
    query, key, value = _projected(case, layout.query_starts[-1] + case.padded)
    real = layout.query_starts[-1]
    most = -(-max(layout.context_lengths) // case.block_tokens) * case.block_tokens
    rules = PLAIN
    if case.softcap or case.bias or case.sinks:
        rules = ScoreRules(
            softcap=case.softcap,
            bias_HL=torch.randn(case.heads, most) if case.bias else None,
            sinks_H=torch.randn(case.heads) if case.sinks else None,
        )
    expected = TorchBackend().attend(
        query[:real],
        key[:real],
        value[:real],
        twin,
        replace(layout, slots=layout.slots[:real], positions=layout.positions[:real]),
        scale=0.2,
        window=case.window,
        rules=rules,
    )
    out = TritonBackend(8, splits=case.splits).attend(
        query, key, value, cache, layout, scale=0.2, window=case.window, rules=rules
    )
    same = all(
        torch.equal(mine.nan_to_num(7.0), others.nan_to_num(7.0))
        for mine, others in ((cache.keys, twin.keys), (cache.values, twin.values))
    )
    return {"difference": float((out[:real].float() - expected.float()).abs().max()), "caches are equal": same}


def _lay_out(case: Case) -> tuple[StepLayout, list[int]]:
    size = case.block_tokens
    counts = [-(-length // size) for length, _ in case.spans]
    free = list(range(sum(counts) + 4))
    random.shuffle(free)
    tables = [[free.pop() for _ in range(count)] for count in counts]
    slots, positions, starts = [], [], [0]
    for (length, new), table in zip(case.spans, tables, strict=True):
        places = range(length - new, length)
        slots += [table[place // size] * size + place % size for place in places]
        positions += list(places)
        starts.append(starts[-1] + new)
    width = max(counts)
    layout = StepLayout(
        slots=torch.tensor(slots + [-1] * case.padded),
        positions=torch.tensor(positions + [-1] * case.padded, dtype=torch.int32),
        query_starts=tuple(starts),
        context_lengths=tuple(length for length, _ in case.spans),
        block_tables=torch.tensor([[0] * width, *reversed([t + [99] * (width - len(t)) for t in tables])], dtype=torch.int32),
        table_rows=tuple(range(len(tables), 0, -1)),
    )
    return layout, [block for table in tables for block in table]


def _poison(cache: LayerCache, case: Case, layout: StepLayout, blocks: list[int]) -> None:
    """Blocks of nobody, and slots behind a sequence's end, may hold what would show in any sum."""
    others = sorted(set(range(cache.keys.shape[0])) - set(blocks))
    cache.keys[others], cache.values[others] = math.nan, math.nan
    for (length, _), row in zip(case.spans, layout.table_rows, strict=True):
        if rest := length % case.block_tokens:
            last = int(layout.block_tables[row, length // case.block_tokens])
            cache.keys[last, :, :, rest:], cache.values[last, :, rest:] = math.nan, math.nan


def _projected(case: Case, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads, width = case.heads, case.kv_heads, case.head_dim
    if case.strided:
        fused = torch.randn(heads + 2 * kv_heads, tokens, width).to(case.dtype).transpose(0, 1)
        return fused[:, :heads], fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :]
    query = torch.randn(tokens, heads, width).to(case.dtype)
    return query, torch.randn(tokens, kv_heads, width).to(case.dtype), torch.randn(tokens, kv_heads, width).to(case.dtype)


if __name__ == "__main__":
    print(json.dumps({name: compare(case) for name, case in CASES.items()}))
