"""Triton kernels: a step's keys and values into their slots, attention of its tokens, and the sum over splits.

Both turn what they are given by the rotary angles first, where a layer leaves that to them.

One kernel attends for every phase. A program has a tile: some tokens of one sequence, and of each up to R of the query heads
that share one key/value head, which are the rows of its products. In decoding a sequence's positions are split among programs
by its own length alone, so that its neighbours change no bit of its result; ``combine`` then weighs their parts.

Shapes and letters are those of ``serve.model.attention``; besides:
    M rows of a tile: tokens x R; a power of two, at least 16     N positions that are looked at at once
    R query heads of a program     D2 head size, rounded up to a power of two, at least 16

A tile is four numbers: the row of its sequence's block table, its first token, how many tokens it has, and how many tokens the
tiles before it have. A token of position -1 has no sequence, and one of slot -1 is written nowhere: such rows fill up the
steps of a captured graph.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _kept_as(x, dtype: tl.constexpr):
    """In the cache's type; fp8 holds no more than 448, and neither infinity nor what a conversion makes of it."""
    if dtype == tl.float8e4nv:
        x = x.to(tl.float32)
        x = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -448.0), 448.0), float("nan"))
    return x.to(dtype)


@triton.jit
def _partner(d, TURNED: tl.constexpr, PAIRS: tl.constexpr):
    """Which feature each of the first TURNED ones is turned with: the one beside it, or its place in the other half."""
    if PAIRS:
        return d ^ 1
    else:
        HALF: tl.constexpr = TURNED // 2
        # The largest power of two that divides a half: so many partners lie side by side, and are read at once.
        TOGETHER: tl.constexpr = HALF & -HALF
        return tl.max_contiguous(tl.multiple_of(tl.where(d < HALF, d + HALF, d - HALF), TOGETHER), TOGETHER)


@triton.jit
def _angle(d, TURNED: tl.constexpr, PAIRS: tl.constexpr, TOLD_ONCE: tl.constexpr):
    """The place of each feature's angle in a row of angles."""
    if not TOLD_ONCE:
        return d
    elif PAIRS:
        return d // 2
    else:
        return d % (TURNED // 2)


@triton.jit
def _turned(x, row, cosines, sines, angle, kept, d, partner, TURNED: tl.constexpr, PAIRS: tl.constexpr):
    """The features ``d`` of ``x``, loaded from ``row``, with the first TURNED turned by the rotary angles.

    By angles of the type of ``x`` it is rounded where torch's operations round: both products, then their sum.

    Args:
        cosines, sines: of all tokens; ``angle``: the place of each element's.
        kept: which elements are there.
        partner: see ``_partner``.
    """
    turns = kept & (d < TURNED)
    other = tl.load(row + partner, mask=turns, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + angle, mask=turns, other=1.0).to(tl.float32)
    sine = tl.load(sines + angle, mask=turns, other=0.0).to(tl.float32)
    is_first = d % 2 == 0 if PAIRS else d < TURNED // 2
    own = x.to(tl.float32) * cosine
    others = tl.where(is_first, -other, other) * sine
    if cosines.dtype == row.dtype:
        own = own.to(x.dtype).to(tl.float32)
        others = others.to(x.dtype).to(tl.float32)
    return (own + others).to(x.dtype)


@triton.jit
def _queries(
    rows, token, cosines, sines, angle_token, kept, d, TURNED: tl.constexpr, PAIRS: tl.constexpr, TOLD_ONCE: tl.constexpr
):
    """A tile's queries [M, D2], turned; ``rows`` [M, 1]: where each begins."""
    q = tl.load(rows + d[None, :], mask=kept, other=0.0)
    if TURNED > 0:
        angle = token[:, None] * angle_token + _angle(d, TURNED, PAIRS, TOLD_ONCE)[None, :]
        partner = _partner(d, TURNED, PAIRS)[None, :]
        q = _turned(q, rows, cosines, sines, angle, kept, d[None, :], partner, TURNED, PAIRS)
    return q


@triton.jit
def write_kv(
    key, value, keys, values, slots, cosines, sines, key_token, key_head, value_token, value_head, angle_token,
    G: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, S: tl.constexpr, TURNED: tl.constexpr, PAIRS: tl.constexpr,
    TOLD_ONCE: tl.constexpr,
):  # fmt: skip
    """Grid (T, G): one head's key and value of one token. ``*_token`` and ``*_head`` are strides in elements."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    d = tl.arange(0, D2)
    kept = (d < D) & (slot >= 0)
    base = (slot // S * G + head) * D * S + slot % S * D
    row = key + token * key_token + head * key_head
    k = tl.load(row + d, mask=kept)
    if TURNED > 0:
        angle = token * angle_token + _angle(d, TURNED, PAIRS, TOLD_ONCE)
        k = _turned(k, row, cosines, sines, angle, kept, d, _partner(d, TURNED, PAIRS), TURNED, PAIRS)
    v = tl.load(value + token * value_token + head * value_head + d, mask=kept)
    tl.store(keys + base + d, _kept_as(k, keys.dtype.element_ty), mask=kept)
    tl.store(values + base + d, _kept_as(v, values.dtype.element_ty), mask=kept)


@triton.jit
def _rows(first, count, before, GROUP: tl.constexpr, R: tl.constexpr, M: tl.constexpr):
    """A program's rows of products, of a tile's numbers.

    Returns:
        (key/value head, tokens [M], heads [M], which of them are real [M], their numbers among the tokens of all tiles [M]).
    """
    PARTS: tl.constexpr = (GROUP + R - 1) // R
    kv_head = tl.program_id(1) // PARTS
    m = tl.arange(0, M)
    member = tl.program_id(1) % PARTS * R + m % R
    real = (m // R < count) & (member < GROUP)
    return kv_head, (first + m // R).to(tl.int64), kv_head * GROUP + member, real, before.to(tl.int64) + m // R


@triton.jit
def _rows_again(tiles, GROUP: tl.constexpr, R: tl.constexpr, M: tl.constexpr):
    """``_rows``, of numbers that are read anew: behind a loop, so that it has their registers for itself."""
    tile = tiles + 4 * tl.program_id(0)
    first = tl.load(tile + 1, volatile=True)
    count = tl.load(tile + 2, volatile=True)
    before = tl.load(tile + 3, volatile=True)
    return _rows(first, count, before, GROUP, R, M)


@triton.jit
def _find_tile(
    tiles, positions, GROUP: tl.constexpr, R: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """A program's rows of products, and the positions that they see.

    Returns:
        (row of the block table, key/value head, tokens [M], heads [M], which of them are real [M], their positions [M], their
        numbers among the tokens of all tiles [M], first position, the position behind the last, positions of a share).
    """
    tile = tiles + 4 * tl.program_id(0)
    row = tl.load(tile).to(tl.int64)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    kv_head, token, head, real, number = _rows(first, count, tl.load(tile + 3), GROUP, R, M)
    position = tl.load(positions + token, mask=real, other=-1)
    high = tl.load(positions + first + count - 1) + 1
    low = 0
    if WINDOW > 0:
        low = tl.maximum(tl.load(positions + first) - WINDOW + 1, 0) // N * N
    share = tl.maximum(tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), N), SPLITS) * N, SHARE)
    return row, kv_head, token, head, real, position, number, low, high, share


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
def _look(
    q, keys, values, tables, bias, scale, softcap, row, kv_head, head, position, real, begin, end, table_width, bias_width,
    G: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, S: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the queries [M, D2] make of the positions from ``begin`` to ``end``.

    Returns:
        (greatest scores to base 2 [M], masses of the softmax [M], unscaled sums [M, D2]).
    """
    d = tl.arange(0, D2)
    top = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    total = tl.zeros([M, D2], tl.float32)
    for n in range(begin, end, N):
        column = n + tl.arange(0, N)
        there = column < end
        block = tl.load(tables + row * table_width + column // S, mask=there, other=0).to(tl.int64)
        places = ((block * G + kv_head) * (D * S) + column % S * D)[:, None] + d[None, :]
        inside = there[:, None] & (d < D)[None, :]
        k = tl.load(keys + places, mask=inside, other=0.0)
        v = tl.load(values + places, mask=inside, other=0.0)
        score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale
        score = _obey(score, softcap, bias, bias_width, head, column, position, there, real, WINDOW, CAPPED, BIASED)
        new = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)  # rows that have seen nothing yet
        weight = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(top - safe)
        mass = mass * shrink + tl.sum(weight, 1)
        total = total * shrink[:, None] + tl.dot(weight.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
        top = new
    return top, mass, total


@triton.jit(do_not_specialize=["table_width", "bias_width"])
def attend(
    query, keys, values, out, partial, stats, tiles, positions, tables, cosines, sines, bias, sinks, scale, softcap,
    query_token, query_head, angle_token, table_width, bias_width,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, S: tl.constexpr, R: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, SHARE: tl.constexpr, CAPPED: tl.constexpr,
    BIASED: tl.constexpr, SINKS: tl.constexpr, TURNED: tl.constexpr, PAIRS: tl.constexpr, TOLD_ONCE: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, G x parts of R heads, any number up to SPLITS): the tile's tokens over shares of their positions.

    A share is no less than SHARE positions, a multiple of N: a short sequence is one share, the other splits find nothing.
    A program computes every so manieth share, one after the other: each as if it were the only one.

    With one split the result goes to ``out`` [T, H, D]; else the unscaled sums to ``partial`` [tokens of all tiles, H, SPLITS,
    D2] and the greatest score (to base 2) and the mass of the softmax to ``stats`` [tokens of all tiles, H, SPLITS, 2], both
    fp32; where a split has no share, a score of -inf, a mass of 0 and nothing else.
    """
    row, kv_head, token, head, real, position, number, low, high, share = _find_tile(
        tiles, positions, H // G, R, M, N, WINDOW, SPLITS, SHARE
    )
    split = tl.program_id(2)
    place = (number * H + head) * SPLITS
    if SPLITS > 1:  # noqa: SIM102  # the compiler decides this, and the device the next
        if low + split * share >= high:  # in a step of few short sequences most programs find no share
            while split < SPLITS:
                tl.store(stats + (place + split) * 2, float("-inf"), mask=real)
                tl.store(stats + (place + split) * 2 + 1, 0.0, mask=real)
                split += tl.num_programs(2)
            return
    d = tl.arange(0, D2)
    kept = real[:, None] & (d < D)[None, :]
    rows = query + token[:, None] * query_token + head[:, None] * query_head
    q = _queries(rows, token, cosines, sines, angle_token, kept, d, TURNED, PAIRS, TOLD_ONCE)
    if WIDEN:
        q = q.to(tl.float32)
    if SPLITS == 1:
        top, mass, total = _look(
            q, keys, values, tables, bias, scale, softcap, row, kv_head, head, position, real, low, high, table_width,
            bias_width, G, D, D2, S, M, N, WINDOW, CAPPED, BIASED, PRECISION,
        )  # fmt: skip
        if SINKS:
            mass, total = _with_sink(top, mass, total, sinks, head, real)
        total = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
        _, token, head, real, _ = _rows_again(tiles, H // G, R, M)
        kept = real[:, None] & (d < D)[None, :]
        tl.store(out + token[:, None] * (H * D) + head[:, None] * D + d[None, :], total.to(out.dtype.element_ty), mask=kept)
    else:
        while split < SPLITS:
            begin = low + split * share
            end = tl.minimum(begin + share, high)
            top, mass, total = _look(
                q, keys, values, tables, bias, scale, softcap, row, kv_head, head, position, real, begin, end, table_width,
                bias_width, G, D, D2, S, M, N, WINDOW, CAPPED, BIASED, PRECISION,
            )  # fmt: skip
            _, _, head, real, number = _rows_again(tiles, H // G, R, M)
            place = (number * H + head) * SPLITS
            tl.store(partial + (place + split)[:, None] * D2 + d[None, :], total, mask=real[:, None] & (begin < end))
            tl.store(stats + (place + split) * 2, top, mask=real)
            tl.store(stats + (place + split) * 2 + 1, mass, mask=real)
            split += tl.num_programs(2)


@triton.jit(do_not_specialize=["tokens"])
def combine(
    partial, stats, out, tiles, sinks, tokens,
    H: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles x tokens, H): weighs the splits of one head of one token. ``tokens``: the most that one of the tiles has."""
    LOG2E: tl.constexpr = 1.4426950408889634
    tile = tl.program_id(0) // tokens
    number = tl.program_id(0) % tokens
    head = tl.program_id(1)
    if number < tl.load(tiles + 4 * tile + 2):
        token = (tl.load(tiles + 4 * tile + 1) + number).to(tl.int64)
        s = tl.arange(0, SPLITS)
        d = tl.arange(0, D2)
        place = ((tl.load(tiles + 4 * tile + 3) + number).to(tl.int64) * H + head) * SPLITS + s
        top = tl.load(stats + place * 2)
        mass = tl.load(stats + place * 2 + 1)  # NaN beside a score of -inf, where all that was seen is NaN
        best = tl.max(top, 0)
        if SINKS:
            sink = tl.load(sinks + head) * LOG2E
            best = tl.maximum(best, sink)
        weight = tl.exp2(top - tl.where(best == float("-inf"), 0.0, best))
        whole = tl.sum(weight * mass, 0)
        if SINKS:
            whole += tl.exp2(sink - best)
        parts = tl.load(partial + place[:, None] * D2 + d[None, :], mask=(top > float("-inf"))[:, None], other=0.0)
        total = tl.sum(parts * weight[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
        tl.store(out + (token * H + head) * D + d, total.to(out.dtype.element_ty), mask=d < D)
