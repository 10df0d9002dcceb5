"""The Triton kernels under Triton's interpreter beside plain torch, on the CPU.

``TRITON_INTERPRET=1 python -m tests.serve.model.cuda.interpreted`` prints a JSON object: by case, the largest difference of
outputs (of those beyond 1 as a share of them), and whether the caches hold the same bits; what neighbours change; and what
comes of the inputs of captured steps. A process
of its own, since Triton decides when the kernels are imported whether they are interpreted.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import torch
from torch import Tensor

from serve.model.attention import PLAIN, LayerCache, Rotary, ScoreRules, StepLayout, TorchBackend, narrowed
from serve.model.cuda.backend import TritonBackend
from tests.serve.model.cuda.cases import CASES, STEPS, TURNED_TOLERANCE, Case
from tests.serve.model.cuda.interpreter import patch_once


def compare(case: Case, device: str = "cpu", processors: int = 8) -> dict[str, float | bool]:
    """One case by both back ends, the numbers made on the CPU."""
    torch.manual_seed(5)
    random.seed(5)
    layout, blocks = _lay_out(case)
    cache = _cache_of(case, layout, blocks, device)
    twin = LayerCache(keys=cache.keys.clone(), values=cache.values.clone())
    real = layout.query_starts[-1]
    query, key, value = (part.to(device) for part in _projected(case, real + case.padded))
    if case.fp8:
        value[1, 0, :2] = 449.0  # more than it can hold
        if not case.turned:  # in keys where queries look at nothing, as such scores would leave no softmax
            query[:, :, :4] = 0.0
            key[0, 0, :4] = torch.tensor([500.0, -1000.0, 30.0, 0.01], dtype=case.dtype, device=device)
    if case.spoiled:
        {"key": key, "query": query}[case.spoiled][0] = math.nan
    rules = rules_of(case, max(layout.context_lengths), device)
    layout = replace(
        layout,
        slots=layout.slots.to(device),
        positions=layout.positions.to(device),
        block_tables=layout.block_tables.to(device),
    )
    rotary = None
    turned_query, turned_key = query, key
    if case.turned:
        rotary = _angles(case, layout.positions, query)
        turned_query, turned_key = _turned(query, rotary), _turned(key, rotary)
    given = (query, key, value, cache, layout)
    scale = min(0.2, 1.6 * case.head_dim**-0.5)
    as_told = {"scale": scale, "window": case.window, "rotary": rotary, "rules": rules}
    out = TritonBackend(processors, splits=case.splits, share=0, programs=case.splits).attend(*given, **as_told)
    if case.splits > 1:  # by fewer programs, each of which has more shares than another, or all
        fewer = TritonBackend(processors, splits=case.splits, share=0, programs=1 if case.splits == 2 else 3)
        again = fewer.attend(*given, **as_told)
        assert torch.equal(out[:real].nan_to_num(7.0), again[:real].nan_to_num(7.0)), "programs change no bit"
    if case.fp8 and case.turned:  # a last bit in what is turned may be a step of fp8, an eighth, which torch goes on with
        kept = _kept(cache.keys, layout, real).to(case.dtype)
        assert _are_near(kept, narrowed(turned_key[:real]), 0.13 if device != "cpu" else 0.0)
        turned_key = kept
    expected = TorchBackend().attend(
        turned_query[:real],
        turned_key[:real],
        value[:real],
        twin,
        replace(layout, slots=layout.slots[:real], positions=layout.positions[:real]),
        scale=scale,
        window=case.window,
        rules=rules,
    )
    # A GPU turns by another order of operations than torch's.
    within = TURNED_TOLERANCE[case.dtype] if case.turned and device != "cpu" else 0.0
    same = _are_near(cache.keys, twin.keys, within) and _are_near(cache.values, twin.values, 0.0)
    return {"difference": _difference(out[:real].float(), expected.float(), case), "caches are equal": same}


def _cache_of(case: Case, layout: StepLayout, blocks: list[int], device: str) -> LayerCache:
    shape = (len(blocks) + 4, case.kv_heads)
    cache = LayerCache(
        keys=torch.randn(*shape, case.block_tokens, case.head_dim).to(case.dtype).transpose(2, 3),
        values=torch.randn(*shape, case.block_tokens, case.head_dim).to(case.dtype),
    )
    _poison(cache, case, layout, blocks)
    if case.fp8:
        cache = LayerCache(keys=narrowed(cache.keys), values=narrowed(cache.values))
    return LayerCache(keys=cache.keys.to(device), values=cache.values.to(device))


def _kept(keys: Tensor, layout: StepLayout, real: int) -> Tensor:
    """The step's keys as the cache has them, [T, G, D]."""
    size = keys.shape[3]
    return keys[layout.slots[:real] // size, :, :, layout.slots[:real] % size]


def _are_near(mine: Tensor, others: Tensor, within: float) -> bool:
    return torch.allclose(mine.float(), others.float(), rtol=within, atol=within, equal_nan=True)


def _difference(out: Tensor, expected: Tensor, case: Case) -> float:
    assert torch.equal(out.isnan(), expected.isnan()), "what is no number stays none, and nothing else becomes it"
    assert out[0].isnan().all() == bool(case.spoiled)
    return float(((out - expected).abs() / expected.abs().clamp(min=1.0)).nan_to_num(0.0).max())


def compare_neighbours() -> dict[int, float]:
    """By length: how far a decoded token's result is from what its sequence computes alone; some are split, some are not."""
    torch.manual_seed(5)
    random.seed(5)
    case = Case(heads=2, kv_heads=1, head_dim=16, spans=((37, 1), (300, 1), (600, 1)))
    layout, blocks = _lay_out(case)
    cache = LayerCache(
        keys=torch.randn(len(blocks) + 4, 1, 16, 16).transpose(2, 3), values=torch.randn(len(blocks) + 4, 1, 16, 16)
    )
    query, key, value = _projected(case, 3)

    def attend(which: slice) -> Tensor:
        own = replace(
            layout,
            slots=layout.slots[which],
            positions=layout.positions[which],
            query_starts=layout.query_starts[: len(layout.table_rows[which]) + 1],
            context_lengths=layout.context_lengths[which],
            table_rows=layout.table_rows[which],
        )
        return TritonBackend(8).attend(query[which], key[which], value[which], cache, own, scale=0.2, window=0)

    together = attend(slice(0, 3))
    alone = torch.cat([attend(slice(i, i + 1)) for i in range(3)])
    differences = (together - alone).abs().amax(dim=(1, 2)).tolist()
    return {length: difference for (length, _), difference in zip(case.spans, differences, strict=True)}


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


def rules_of(case: Case, longest: int, device: str) -> ScoreRules:
    """Those of a case, for so many positions."""
    if not (case.softcap or case.bias or case.sinks):
        return PLAIN
    most = -(-longest // case.block_tokens) * case.block_tokens
    return ScoreRules(
        softcap=case.softcap,
        bias_HL=torch.randn(case.heads, most).to(device) if case.bias else None,
        sinks_H=torch.randn(case.heads).to(device) if case.sinks else None,
    )


def _angles(case: Case, positions_T: Tensor, like: Tensor) -> Rotary:
    """Of every token, of one without a sequence, too; those of pairs in one tensor, as GPT-J has them."""
    angles = torch.outer(positions_T.float(), 0.8 ** torch.arange(case.turned // 2, device=like.device))
    dtype = torch.float32 if case.wide_angles else like.dtype
    if case.pairs:
        sines, cosines = torch.cat([angles.sin(), angles.cos()], dim=1).to(dtype).chunk(2, dim=1)
        return Rotary(cosines, sines, case.turned, pairs=True)
    angles = angles if case.told_once else angles.repeat(1, 2)
    return Rotary(angles.cos().to(dtype), angles.sin().to(dtype), case.turned)


def _turned(x_THD: Tensor, rotary: Rotary) -> Tensor:
    cosines_TR, sines_TR = rotary.cosines[:, None], rotary.sines[:, None]
    turned, rest = x_THD.split([rotary.turned, x_THD.shape[2] - rotary.turned], dim=2)
    if rotary.pairs:
        cosines_TR, sines_TR = (part.repeat_interleave(2, dim=2) for part in (cosines_TR, sines_TR))
        other = torch.stack([-turned[:, :, 1::2], turned[:, :, ::2]], dim=3).flatten(2)
    else:
        if cosines_TR.shape[2] < rotary.turned:
            cosines_TR, sines_TR = cosines_TR.repeat(1, 1, 2), sines_TR.repeat(1, 1, 2)
        first, second = turned.chunk(2, dim=2)
        other = torch.cat([-second, first], dim=2)
    return torch.cat([(turned * cosines_TR + other * sines_TR).to(x_THD.dtype), rest], dim=2)


if __name__ == "__main__":
    from tests.serve.model.cuda import interpreted_steps  # which knows this module

    patch_once()
    beside = {
        "differences beside neighbours": compare_neighbours(),
        "captured inputs": {name: interpreted_steps.compare_steps(case) for name, case in STEPS.items()},
    }
    print(json.dumps({name: compare(case) for name, case in CASES.items()} | beside))
