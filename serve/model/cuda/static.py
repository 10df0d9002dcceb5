"""Attention in plain torch whose shapes depend on no length: captured steps are tested with it.

Letters of shapes are those of ``serve.model.attention``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serve.model.attention import (
    PLAIN,
    LayerCache,
    Rotary,
    ScoreRules,
    StepLayout,
    TorchBackend,
    narrowed,
    taken,
    whole_numbers,
)


class StaticTorchBackend:
    """The reference for captured steps: every device, every type, and far more work than there is to do.

    Of a step of one token of each sequence, each token's row of the block tables is read in its whole width, and what it does
    not see is masked. Nothing depends on lengths as numbers, so a captured step is right for the next ones, too. A token of
    slot -1 is written nowhere; one of position -1 sees nothing and gives zeros. Other steps are ``TorchBackend``'s.
    """

    rotates = False
    rotates_by_any = False
    writes_alone = False
    keys_by_position = False

    def __init__(self) -> None:
        self._plain = TorchBackend()

    def attend(
        self,
        query_THD: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
        layer: LayerCache,
        layout: StepLayout,
        *,
        scale: float,
        window: int,
        rotary: Rotary | None = None,
        rules: ScoreRules = PLAIN,
    ) -> Tensor:
        """Write the step's keys and values into their slots, then attend.

        Causal, each token over its own sequence's cached positions; [T, H, D] in the query's type. Queries and keys come turned
        already: ``rotary`` must be ``None``.
        """
        rows, tokens = layout.table_rows, len(query_THD)
        if tokens != len(rows):  # some have several tokens: such steps are never captured
            return self._plain.attend(
                query_THD, key_TGD, value_TGD, layer, layout, scale=scale, window=window, rotary=rotary, rules=rules
            )
        assert rotary is None, "queries and keys come turned already"
        _write(key_TGD, value_TGD, layer, layout.slots)
        tables_TW = layout.block_tables[:tokens] if rows == tuple(range(tokens)) else layout.block_tables[list(rows)]
        if rules.bias_HL is not None:  # tables may be wider than a sequence may be long
            tables_TW = tables_TW[:, : rules.bias_HL.shape[1] // layer.values.shape[2]]
        return _attend(query_THD, tables_TW, layout.positions, layer, scale, window, rules)


def _write(key_TGD: Tensor, value_TGD: Tensor, layer: LayerCache, slots_T: Tensor) -> None:
    """Keep keys and values; of tokens without a slot nothing.

    Indices cannot be left out of a captured step. So a token without a slot writes what the first token writes, where that
    does; and if that has no slot either, what is there already.
    """
    source_T = torch.where(slots_T >= 0, torch.arange(len(slots_T), device=slots_T.device), 0)
    there_T = slots_T[source_T] >= 0
    slots_T = slots_T[source_T].clamp(min=0)
    size = layer.values.shape[2]
    block_T, offset_T = slots_T // size, slots_T % size

    def put(into: Tensor, new: Tensor, *place: Tensor | slice) -> None:
        new = narrowed(new) if into.dtype == torch.float8_e4m3fn else new.to(into.dtype)
        if into.dtype == torch.float8_e4m3fn:  # torch places bytes, and knows no fp8 there
            new, into = new.view(torch.uint8), into.view(torch.uint8)
        kept = there_T.view(-1, *(1 for _ in new.shape[1:]))
        into[place] = torch.where(kept, new[source_T], into[place])

    every = slice(None)
    if layer.key_scales is not None and layer.value_scales is not None:
        key_TGD, key_scale_TG = whole_numbers(key_TGD)
        value_TGD, value_scale_TG = whole_numbers(value_TGD)
        put(layer.key_scales, key_scale_TG, block_T, every, offset_T)
        put(layer.value_scales, value_scale_TG, block_T, every, offset_T)
    put(layer.keys, key_TGD, block_T, every, every, offset_T)
    put(layer.values, value_TGD, block_T, every, offset_T)


def _attend(
    query_THD: Tensor, tables_TW: Tensor, positions_T: Tensor, layer: LayerCache, scale: float, window: int, rules: ScoreRules
) -> Tensor:
    """Attention of tokens, each over its own row of tables, in fp32; its result in the query's type."""
    tokens, heads, _ = query_THD.shape
    tables_TW = tables_TW.long()
    key_TWGDS, value_TWGSD = (taken(kept, tables_TW).float() for kept in (layer.keys, layer.values))
    if layer.key_scales is not None and layer.value_scales is not None:
        key_TWGDS = key_TWGDS * layer.key_scales[tables_TW].float()[:, :, :, None]
        value_TWGSD = value_TWGSD * layer.value_scales[tables_TW].float()[..., None]
    key_TGLD = key_TWGDS.permute(0, 2, 1, 4, 3).flatten(2, 3)
    value_TGLD = value_TWGSD.permute(0, 2, 1, 3, 4).flatten(2, 3)
    column_L = torch.arange(key_TGLD.shape[2], device=query_THD.device)
    seen_TL = column_L <= positions_T[:, None]
    if window:
        seen_TL &= column_L > positions_T[:, None] - window
    value_TGLD = torch.where(seen_TL[:, None, :, None], value_TGLD, 0.0)  # beyond a sequence's end anything may stand, NaN too
    groups = (tokens, key_TGLD.shape[1], heads // key_TGLD.shape[1], -1)
    query_TGRD = query_THD.float().reshape(groups)
    scores_THL = (query_TGRD @ key_TGLD.transpose(2, 3)).flatten(1, 2) * scale
    if rules.softcap:
        scores_THL = (scores_THL / rules.softcap).tanh() * rules.softcap
    if rules.bias_HL is not None:
        scores_THL = scores_THL + rules.bias_HL[:, : len(column_L)]
    scores_THL = torch.where(seen_TL[:, None], scores_THL, float("-inf"))
    if rules.sinks_H is not None:
        scores_THL = torch.cat([scores_THL, rules.sinks_H[None, :, None].expand(tokens, -1, 1)], dim=2)
    weights_THL = scores_THL.softmax(dim=2)[:, :, : len(column_L)]
    weights_THL = torch.where(positions_T[:, None, None] >= 0, weights_THL, 0.0)
    out_TGRD = weights_THL.reshape(groups) @ value_TGLD
    return out_TGRD.reshape(tokens, heads, -1).to(query_THD.dtype)
