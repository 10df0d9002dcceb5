"""Triton kernels: a step's keys and values into their slots, attention of its tokens, and the sum over splits.

One kernel attends for every phase. A program has a tile: some tokens of one sequence, and of each the query heads that share
one key/value head, which are the rows of its products. Positions are split among programs where there are few tiles, as in
decoding; ``combine`` then weighs their parts.

Shapes and letters are those of ``serve.model.attention``; besides:
    M rows of a tile: tokens x query heads of one key/value head; a power of two, at least 16
    N positions that are looked at at once     D2 head size, rounded up to a power of two     R query heads of a key/value head

A tile is three numbers: the row of its sequence's block table, its first token, and how many tokens it has. A token of position
-1 has no sequence, and one of slot -1 is written nowhere: such rows fill up the steps of a captured graph.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_kv(
    key,
    value,
    keys,
    values,
    slots,
    key_token,
    key_head,
    value_token,
    value_head,
    G: tl.constexpr,
    D: tl.constexpr,
    D2: tl.constexpr,
    S: tl.constexpr,
):
    """Grid (T, G): one head's key and value of one token. ``*_token`` and ``*_head`` are strides in elements."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    d = tl.arange(0, D2)
    kept = (d < D) & (slot >= 0)
    base = (slot // S * G + head) * D * S
    k = tl.load(key + token * key_token + head * key_head + d, mask=kept)
    v = tl.load(value + token * value_token + head * value_head + d, mask=kept)
    tl.store(keys + base + d * S + slot % S, k.to(keys.dtype.element_ty), mask=kept)
    tl.store(values + base + slot % S * D + d, v.to(values.dtype.element_ty), mask=kept)


@triton.jit
def _find_tile(tiles, positions, M: tl.constexpr, N: tl.constexpr, R: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr):
    """A program's rows of products, and the share of positions that it looks at.

    Returns:
        (row of the block table, tokens [M], heads [M], which of them are real [M], their positions [M], first position, the
        position behind the last).
    """
    tile = tl.program_id(0)
    row = tl.load(tiles + 3 * tile).to(tl.int64)
    first = tl.load(tiles + 3 * tile + 1)
    count = tl.load(tiles + 3 * tile + 2)
    m = tl.arange(0, M)
    real = m // R < count
    token = (first + m // R).to(tl.int64)
    head = tl.program_id(1) * R + m % R
    position = tl.load(positions + token, mask=real, other=-1)
    high = tl.load(positions + first + count - 1) + 1
    low = 0
    if WINDOW > 0:
        low = tl.maximum(tl.load(positions + first) - WINDOW + 1, 0) // N * N
    share = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), N), SPLITS) * N
    begin = low + tl.program_id(2) * share
    return row, token, head, real, position, begin, tl.minimum(begin + share, high)


@triton.jit
def _obey(
    score, softcap, bias, bias_width, head, column, position, there, real,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Scores [M, N] by the layer's rules, to base 2; those of positions that a row does not see are -inf."""
    LOG2E: tl.constexpr = 1.4426950408889634
    if CAPPED:  # softcap * tanh(score / softcap)
        score = softcap - 2.0 * softcap / (tl.exp2(score * (2.0 * LOG2E) / softcap) + 1.0)
    if BIASED:
        places = head[:, None] * bias_width + column[None, :]
        score = score + tl.load(bias + places, mask=real[:, None] & there[None, :], other=0.0)
    seen = (column[None, :] <= position[:, None]) & there[None, :]
    if WINDOW > 0:
        seen = seen & (column[None, :] > position[:, None] - WINDOW)
    return tl.where(seen, score * LOG2E, float("-inf"))


@triton.jit
def _with_sink(top, mass, total, sinks, head, real):
    """The sums as if each head had one more score, which brings no value."""
    sink = tl.load(sinks + head, mask=real, other=0.0) * 1.4426950408889634
    new = tl.maximum(top, sink)
    shrink = tl.exp2(top - new)
    return mass * shrink + tl.exp2(sink - new), total * shrink[:, None]


@triton.jit
def attend(
    query, keys, values, out, partial, stats, tiles, positions, tables, bias, sinks, scale, softcap,
    query_token, query_head, table_width, bias_width,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, S: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, CAPPED: tl.constexpr, BIASED: tl.constexpr, SINKS: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, G, SPLITS): the tile's tokens over this split's share of their positions.

    With one split the result goes to ``out`` [T, H, D]; else the unscaled sums to ``partial`` [T, H, SPLITS, D2] and the
    greatest score (to base 2) and the mass of the softmax to ``stats`` [T, H, SPLITS, 2], both fp32.
    """
    row, token, head, real, position, begin, end = _find_tile(tiles, positions, M, N, H // G, WINDOW, SPLITS)
    d = tl.arange(0, D2)
    kept = real[:, None] & (d < D)[None, :]
    q = tl.load(query + token[:, None] * query_token + head[:, None] * query_head + d[None, :], mask=kept, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    total = tl.zeros([M, D2], tl.float32)
    for n in range(begin, end, N):
        column = n + tl.arange(0, N)
        there = column < end
        block = tl.load(tables + row * table_width + column // S, mask=there, other=0).to(tl.int64)
        base = (block * G + tl.program_id(1)) * (D * S)
        inside = (d < D)[:, None] & there[None, :]
        k = tl.load(keys + base[None, :] + d[:, None] * S + (column % S)[None, :], mask=inside, other=0.0)
        inside = there[:, None] & (d < D)[None, :]
        v = tl.load(values + base[:, None] + (column % S)[:, None] * D + d[None, :], mask=inside, other=0.0)
        score = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale
        score = _obey(score, softcap, bias, bias_width, head, column, position, there, real, WINDOW, CAPPED, BIASED)
        new = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)  # rows that have seen nothing yet
        weight = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(top - safe)
        mass = mass * shrink + tl.sum(weight, 1)
        total = total * shrink[:, None] + tl.dot(weight.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
        top = new
    if SPLITS == 1:
        if SINKS:
            mass, total = _with_sink(top, mass, total, sinks, head, real)
        total = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
        tl.store(out + token[:, None] * (H * D) + head[:, None] * D + d[None, :], total.to(out.dtype.element_ty), mask=kept)
    else:
        place = (token * H + head) * SPLITS + tl.program_id(2)
        tl.store(partial + place[:, None] * D2 + d[None, :], total, mask=real[:, None])
        tl.store(stats + place * 2, top, mask=real)
        tl.store(stats + place * 2 + 1, mass, mask=real)


@triton.jit
def combine(
    partial,
    stats,
    out,
    tiles,
    sinks,
    H: tl.constexpr,
    D: tl.constexpr,
    D2: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Grid (tiles x TOKENS, H): weighs the splits of one head of one token. TOKENS: how many a tile may have."""
    LOG2E: tl.constexpr = 1.4426950408889634
    tile = tl.program_id(0) // TOKENS
    number = tl.program_id(0) % TOKENS
    head = tl.program_id(1)
    if number < tl.load(tiles + 3 * tile + 2):
        token = (tl.load(tiles + 3 * tile + 1) + number).to(tl.int64)
        s = tl.arange(0, SPLITS)
        d = tl.arange(0, D2)
        place = (token * H + head) * SPLITS + s
        top = tl.load(stats + place * 2)
        mass = tl.load(stats + place * 2 + 1)
        best = tl.max(top, 0)
        if SINKS:
            sink = tl.load(sinks + head) * LOG2E
            best = tl.maximum(best, sink)
        weight = tl.exp2(top - tl.where(best == float("-inf"), 0.0, best))
        whole = tl.sum(weight * mass, 0)
        if SINKS:
            whole += tl.exp2(sink - best)
        parts = tl.load(partial + place[:, None] * D2 + d[None, :])
        total = tl.sum(parts * weight[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
        tl.store(out + (token * H + head) * D + d, total.to(out.dtype.element_ty), mask=d < D)
