"""The last layer of a step with prompts: of most rows nothing is read but their keys and values, so no more is computed.

Shapes.  T tokens of the step   E features of a hidden state
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn

from serve.model.attention import StepLayout, StepState

_LEAST_SPARED: Final = 16
"""Rows for which the layer is entered twice."""


class _Written(Exception):
    """The layer's keys and values are in the cache, and the rest of it is not wanted."""


def compute_what_is_read(layer: nn.Module, state: StepState) -> None:
    """Let a model's last layer compute the rows of ``state.read``, and give the others as they came to it.

    The layer is entered for all rows until their keys and values are written, and then for those that are read, as the new
    tokens of their sequences. What it is given beside hidden states is narrowed by its shape: tensors [1, T, ...] and [T].
    """
    forward: Callable[..., Any] = layer.forward

    def narrowed(hidden_1TE: Tensor, *others: object, **options: object) -> object:
        rows, tokens = state.read, hidden_1TE.shape[1]
        if rows is None or 2 * len(rows) > tokens or tokens - len(rows) < _LEAST_SPARED:
            return forward(hidden_1TE, *others, **options)
        layout, written = state.layout, state.written
        assert layout is not None, "a layer was called outside a step"
        rows = rows or (tokens - 1,)  # one at least: what a layer gives beside hidden states only it can say
        rows_R = torch.tensor(rows, device=hidden_1TE.device)
        try:
            state.layout, state.written = replace(layout, query_starts=(0,), context_lengths=(), table_rows=()), _leave
            _until_written(forward, hidden_1TE, *others, **options)
            state.layout, state.written = _alone(layout, rows, rows_R), written
            given = forward(*_narrow((hidden_1TE, *others), tokens, rows_R), **_narrow(options, tokens, rows_R))
        finally:
            state.layout, state.written = layout, written
        if isinstance(given, tuple):
            return hidden_1TE.index_copy(1, rows_R, given[0]), *given[1:]
        return hidden_1TE.index_copy(1, rows_R, given)

    layer.forward = narrowed


def _leave() -> None:
    raise _Written


def _until_written(forward: Callable[..., Any], *inputs: object, **options: object) -> None:
    try:
        forward(*inputs, **options)
    except _Written:
        return
    raise AssertionError("the last layer has no attention")


def _alone(layout: StepLayout, rows: Sequence[int], rows_R: Tensor) -> StepLayout:
    """The layout of these rows: those of a sequence that follow one another are one, and read its cache together."""
    owners = [owner for owner, (begin, end) in enumerate(pairwise(layout.query_starts)) for _ in range(begin, end)]
    positions_R = layout.positions[rows_R]
    starts, lengths, tables = [0], list[int](), list[int]()
    before = None
    for row, position in zip(rows, positions_R.tolist(), strict=True):
        if before is not None and row == before + 1 and owners[row] == owners[before]:
            starts[-1] += 1
            lengths[-1] = position + 1
        else:
            starts.append(starts[-1] + 1)
            lengths.append(position + 1)
            tables.append(layout.table_rows[owners[row]])
        before = row
    return replace(
        layout,
        slots=layout.slots[rows_R],
        positions=positions_R,
        query_starts=tuple(starts),
        context_lengths=tuple(lengths),
        table_rows=tuple(tables),
        lengths=None if layout.lengths is None else layout.lengths[rows_R],
    )


def _narrow(value: Any, tokens: int, rows_R: Tensor) -> Any:
    """These rows of what is there for every token of a step."""
    if isinstance(value, Tensor):
        if value.dim() > 1 and value.shape[:2] == (1, tokens):
            return value.index_select(1, rows_R)
        return value.index_select(0, rows_R) if value.shape == (tokens,) else value
    if isinstance(value, tuple | list):
        return tuple(_narrow(each, tokens, rows_R) for each in value)
    return {name: _narrow(each, tokens, rows_R) for name, each in value.items()} if isinstance(value, dict) else value
