"""Attention over KV blocks: what a step and a layer give, and attention in plain torch operations.

Shapes.  T tokens of the step, all sequences flat   H query heads on this rank   G key/value heads on this rank
         D head size   B blocks in the pool         S positions per block        Q sequences in the step
         W width of the block tables                R features of a head that the rotary embedding turns
         L positions that a table of biases covers, a multiple of S and no fewer than a sequence may have
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Where a step's tokens lie; tensors on the cache's device."""

    slots: Tensor
    """int64 [T]: block * S + offset, where each token's key and value are written."""
    positions: Tensor
    """int32 [T]: each token's position in its own sequence."""
    query_starts: tuple[int, ...]
    """Q + 1 numbers: tokens [query_starts[i], query_starts[i + 1]) are sequence i's."""
    context_lengths: tuple[int, ...]
    """Q numbers: positions of sequence i that the cache holds after this step's keys are written."""
    block_tables: Tensor
    """int32 [rows, W], contiguous: block ids in order of position; what lies beyond a sequence's last may be anything."""
    table_rows: tuple[int, ...]
    """Q numbers: the row of ``block_tables`` that is sequence i's."""
    lengths: Tensor | None = None
    """int64 [T]: the length by which each token is computed, see ``LengthRule``; ``None`` where that changes nothing."""
    made: dict[object, object] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What a back end makes of the layout once for all layers; as long-lived as it, and not handed on to a changed copy."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """What turns the first R features of a step's queries and keys, two by two."""

    cosines: Tensor
    """[T, R], as transformers' ``position_embeddings``; [T, R / 2] where each is told once for the two that it turns."""
    sines: Tensor
    """As the cosines. Their last dimensions are contiguous, and their rows as far from one another."""
    turned: int
    """R"""
    pairs: bool = False
    """Whether neighbours are turned together, as in GPT-J; else the two halves of the R features, as in GPT-NeoX and Llama."""

    @property
    def is_plain(self) -> bool:
        """Whether halves are turned, by contiguous angles that are told for each feature."""
        return not self.pairs and self.cosines.shape[1] == self.turned and self.cosines.is_contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRules:
    """What some families make of a layer's scores, beyond the scale: score = cap(scale * q k) + bias, then the softmax."""

    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0: they stay what they are."""
    sinks_H: Tensor | None = None
    """fp32 [H]: one more score for each head, which takes its share of the softmax and brings no value."""
    bias_HL: Tensor | None = None
    """fp32 [H, L], contiguous: what is added to each head's score with the key at each position (ALiBi)."""


PLAIN: Final = ScoreRules()
"""Scores as they are."""


class Backend(Protocol):
    """One way to compute attention over blocks."""

    rotates: bool
    """Whether ``attend`` can turn queries and keys itself, by plain angles of their own type."""
    rotates_by_any: bool
    """Whether by all others, too: see ``Rotary``."""
    writes_alone: bool
    """Whether ``attend`` takes a layout of tokens without sequences, whose keys and values it writes, and no more."""
    keys_by_position: bool
    """Whether keys shall lie in memory as values do, [B, G, S, D]: a position's features side by side."""

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

        Causal attention of each token over its own sequence's cached positions; [T, H, D] in the query's type. With ``rotary``
        queries and keys are turned first.
        """
        ...


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values.

    ``keys`` is [B, G, D, S], ``values`` [B, G, S, D]; both are in the model's type, in int8 with scales, or in fp8 (e4m3)
    without. In memory keys lie as their shape says, so that a vector holds neighbouring positions, or as values do: the back
    end that reads them says which, see ``Backend.keys_by_position``.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    """bf16 [B, G, S] where ``keys`` and ``values`` are int8: what a position's whole numbers are multiplied by."""
    value_scales: Tensor | None = None

    @property
    def keys_by_position(self) -> bool:
        """Whether keys lie in memory as values do."""
        return self.keys.stride(3) != 1

    def write(self, block_T: Tensor, offset_T: Tensor, key_TGD: Tensor, value_TGD: Tensor) -> None:
        """Keep the keys and values of some tokens, each at its own offset of its own block."""
        if self.key_scales is not None and self.value_scales is not None:
            key_TGD, self.key_scales[block_T, :, offset_T] = whole_numbers(key_TGD)
            value_TGD, self.value_scales[block_T, :, offset_T] = whole_numbers(value_TGD)
        keys, values = self.keys, self.values
        if keys.dtype == torch.float8_e4m3fn:  # torch places bytes, and knows no fp8 there
            key_TGD, value_TGD = narrowed(key_TGD).view(torch.uint8), narrowed(value_TGD).view(torch.uint8)
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
        keys[block_T, :, :, offset_T] = key_TGD
        values[block_T, :, offset_T] = value_TGD

    def read(self, table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [G, L, D] of the blocks of a table, in their order."""
        key_WGSD, value_WGSD = taken(self.keys, table).transpose(2, 3), taken(self.values, table)
        if self.keys.dtype == torch.float8_e4m3fn:
            key_WGSD, value_WGSD = key_WGSD.to(dtype), value_WGSD.to(dtype)
        if self.key_scales is not None and self.value_scales is not None:
            key_WGSD = (key_WGSD * self.key_scales[table].float()[..., None]).to(dtype)
            value_WGSD = (value_WGSD * self.value_scales[table].float()[..., None]).to(dtype)
        return key_WGSD.transpose(0, 1).flatten(1, 2), value_WGSD.transpose(0, 1).flatten(1, 2)


def narrowed(x: Tensor) -> Tensor:
    """Numbers as fp8 (e4m3): what is beyond 448, its largest, becomes that, and infinity, of which it has none, becomes NaN."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    return torch.where(x.isfinite(), x.clamp(-largest, largest), torch.nan).to(torch.float8_e4m3fn)


def taken(kept_B: Tensor, table: Tensor) -> Tensor:
    """``kept_B[table]``, of types that torch cannot index, too."""
    return kept_B.view(torch.uint8)[table].view(kept_B.dtype) if kept_B.dtype == torch.float8_e4m3fn else kept_B[table]


def whole_numbers(x_TGD: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's and head's features as int8 between -127 and 127, and what they are multiplied by, bf16 [T, G].

    The scale is rounded before anything is divided by it, so a feature is off by half of it at most. NaN or infinity makes the
    scale NaN, and with it whatever reads the position.
    """
    wide_TGD = x_TGD.float()
    scale_TG = (wide_TGD.abs().amax(dim=2) / 127).to(torch.bfloat16)
    scale_TG = torch.where(wide_TGD.isfinite().all(dim=2), scale_TG, torch.nan)
    numbers_TGD = (wide_TGD / scale_TG.float()[..., None]).round().clamp(-127, 127)
    return numbers_TGD.nan_to_num(0.0).to(torch.int8), scale_TG


def _do_nothing() -> None:
    pass


class StepState:
    """The layout of the step being computed: the runner sets it, every layer's attention reads it."""

    __slots__ = ("layout", "look", "read", "rotary", "written")

    def __init__(self) -> None:
        self.layout: StepLayout | None = None
        self.look: Callable[[], None] = _do_nothing
        """Called in each layer. What it raises ends the step."""
        self.written: Callable[[], None] = _do_nothing
        """Called in each layer when its keys and values are in the cache. What it raises ends the layer."""
        self.read: tuple[int, ...] | None = None
        """The rows whose last hidden states are read, ascending; ``None``: all of them."""
        self.rotary: Rotary | None = None
        """What the layer being computed has left to the back end to turn its queries and keys with."""

    def postpone_rotary(
        self,
        query: Tensor,
        key: Tensor,
        cosines_1TR: Tensor,
        sines_1TR: Tensor,
        *_: object,
        told_once: bool = False,
        **__: object,
    ) -> tuple[Tensor, Tensor]:
        """Stands in for transformers' ``apply_rotary_pos_emb``: the attention that follows turns queries and keys itself.

        Args:
            told_once: an angle is told once for the two features that it turns.
        """
        turned = cosines_1TR.shape[-1] * (2 if told_once else 1)
        assert turned <= query.shape[-1], "check_rope refuses to turn more features than a head has"
        self.rotary = Rotary(cosines_1TR[0].contiguous(), sines_1TR[0].contiguous(), turned)
        return query, key


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """One layer's attention: its cache, its window, and the state it shares with the other layers."""

    cache: LayerCache
    state: StepState
    backend: Backend
    window: int = 0
    """0: all earlier positions are seen; else position p sees (p - window, p]."""
    rules: ScoreRules = PLAIN

    def __call__(
        self, query_1HTD: Tensor, key_1GTD: Tensor, value_1GTD: Tensor, scale: float, window: int, softcap: float = 0.0
    ) -> Tensor:
        """Write the step's keys and values, then attend; returns [1, T, H, D]."""
        layout = self.state.layout
        assert layout is not None, "attention was called outside a step"
        rotary, self.state.rotary = self.state.rotary, None
        self.state.look()
        out_THD = self.backend.attend(
            query_1HTD[0].transpose(0, 1),
            key_1GTD[0].transpose(0, 1),
            value_1GTD[0].transpose(0, 1),
            self.cache,
            layout,
            scale=scale,
            window=window,
            rotary=rotary,
            rules=replace(self.rules, softcap=softcap) if softcap else self.rules,
        )
        self.state.written()
        return out_THD.unsqueeze(0)


class TorchBackend:
    """Attention in plain torch operations: every device, every type; gathers each sequence's blocks."""

    rotates = False
    rotates_by_any = False
    writes_alone = True
    keys_by_position = False

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
        """Write the step's keys and values into their slots, then attend, one sequence after the other.

        Causal, each token over its own sequence's cached positions; [T, H, D] in the query's type. Queries and keys come turned
        already: ``rotary`` must be ``None``.
        """
        assert rotary is None, "queries and keys come turned already"
        block_tokens = layer.values.shape[2]
        block, offset = layout.slots // block_tokens, layout.slots % block_tokens
        layer.write(block, offset, key_TGD, value_TGD)
        out_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype, device=query_THD.device)
        for i, length in enumerate(layout.context_lengths):
            begin, end = layout.query_starts[i], layout.query_starts[i + 1]
            first = max(0, length - (end - begin) - window + 1) // block_tokens if window else 0
            table = layout.block_tables[layout.table_rows[i], first : -(-length // block_tokens)].long()
            low = first * block_tokens
            # Slots past the sequence's end may hold anything, NaN included: they are cut off, not masked.
            key_GLD, value_GLD = (part_GLD[:, : length - low] for part_GLD in layer.read(table, query_THD.dtype))
            row = layout.positions[begin:end, None]
            column = torch.arange(low, length, device=row.device)[None, :]
            seen = column <= row
            if window:
                seen &= column > row - window
            if rules is not PLAIN:
                bias_HL = None if rules.bias_HL is None else rules.bias_HL[:, low:length]
                out_THD[begin:end] = _by_rules(query_THD[begin:end], key_GLD, value_GLD, seen, scale, rules, bias_HL)
                continue
            out_THD[begin:end] = nn.functional.scaled_dot_product_attention(
                query_THD[begin:end].transpose(0, 1)[None],
                key_GLD[None],
                value_GLD[None],
                attn_mask=seen,
                scale=scale,
                enable_gqa=key_GLD.shape[0] != query_THD.shape[1],
            )[0].transpose(0, 1)
        return out_THD


def _by_rules(
    query_THD: Tensor,
    key_GLD: Tensor,
    value_GLD: Tensor,
    seen_TL: Tensor,
    scale: float,
    rules: ScoreRules,
    bias_HL: Tensor | None,
) -> Tensor:
    """Attention of one sequence whose scores have rules, written out in fp32; torch's own knows none of them."""
    group = query_THD.shape[1] // key_GLD.shape[0]
    key_HLD, value_HLD = (part.float().repeat_interleave(group, dim=0) for part in (key_GLD, value_GLD))
    scores_HTL = query_THD.float().transpose(0, 1) @ key_HLD.transpose(1, 2) * scale
    if rules.softcap:
        scores_HTL = (scores_HTL / rules.softcap).tanh() * rules.softcap
    if bias_HL is not None:
        scores_HTL = scores_HTL + bias_HL[:, None]
    scores_HTL = scores_HTL.masked_fill(~seen_TL, float("-inf"))
    if rules.sinks_H is not None:
        sinks_HT1 = rules.sinks_H[:, None, None].expand(-1, scores_HTL.shape[1], 1)
        weights_HTL = torch.cat([scores_HTL, sinks_HT1], dim=2).softmax(dim=2)[:, :, :-1]
    else:
        weights_HTL = scores_HTL.softmax(dim=2)
    return (weights_HTL @ value_HLD).transpose(0, 1).to(query_THD.dtype)
