"""Attention over KV blocks by the Triton kernels of ``kernels``: one back end for every CUDA device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from serve.model.attention import PLAIN, LayerCache, Rotary, ScoreRules, StepLayout
from serve.model.cuda import kernels
from serve.model.cuda.tiling import (
    COMBINE_WARPS,
    SHARE_POSITIONS,
    WRITE_WARPS,
    Shape,
    cut,
    padded_head,
    precision_of,
    programs_for,
    shape_of,
    splits_for,
)
from serve.model.sending import send


@dataclass(frozen=True, slots=True)
class _Tiles:
    """A step's tiles on the device, int32 [tiles, 4] each; the same for all layers."""

    short: Tensor
    long: Tensor
    short_tokens: int
    """How many tokens all short tiles have together."""
    most_tokens: int
    """How many one of them has at most."""


class TritonBackend:
    """Attention by Triton kernels: fp16, bf16 and fp32, on CUDA devices, nothing gathered.

    Needs Triton, which torch for CUDA brings. Under its interpreter (``TRITON_INTERPRET=1``) it computes on the CPU, slowly.
    """

    rotates = True
    rotates_by_any = True
    writes_alone = False
    keys_by_position = True

    def __init__(
        self, processors: int, *, splits: int | None = None, share: int = SHARE_POSITIONS, programs: int | None = None
    ) -> None:
        """
        Args:
            processors: multiprocessors of the device.
            splits: among how many programs positions are split in decoding, a power of two; ``None`` chooses by heads.
            share: sequences of no more positions than this are not split.
            programs: how many compute these splits, no more than there are; ``None`` chooses by the size of the step.
        """
        self._processors = processors
        self._splits = splits
        self._share = share
        self._programs = programs
        self._interpreted = bool(triton.knobs.runtime.interpret)

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
        """Write the step's keys and values into their slots, then attend: a launch for short pieces, and one for long ones.

        Causal, each token over its own sequence's cached positions; [T, H, D] in the query's type.
        """
        assert layer.keys.transpose(2, 3).is_contiguous(), "keys lie position by position"
        query_THD, key_TGD, value_TGD = (
            part if part.stride(-1) == 1 else part.contiguous() for part in (query_THD, key_TGD, value_TGD)
        )
        turns = _Turns.of(rotary, query_THD)
        self._write(key_TGD, value_TGD, layer, layout.slots, turns)
        out_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype, device=query_THD.device)
        heads, kv_heads, head_dim = query_THD.shape[1], key_TGD.shape[1], query_THD.shape[2]
        group = heads // kv_heads
        facts = {"capped": rules.softcap != 0.0, "biased": rules.bias_HL is not None}
        facts["fp8"] = layer.keys.dtype == torch.float8_e4m3fn
        short, long = (shape_of(query_THD.dtype, head_dim, group, long=phase, **facts) for phase in (False, True))
        tiles = self._tiles_of(layout, (short.tokens, long.tokens))
        launch = _Launch(query_THD, layer, layout, out_THD, scale, window, turns, rules, widen=self._widens(query_THD.dtype))
        if len(tiles.short):
            each, longest = kv_heads * -(-group // short.heads), max(layout.context_lengths)
            splits = (self._splits or splits_for(each, self._processors)) if longest > self._share else 1
            programs = self._programs or programs_for(splits, len(tiles.short) * each, self._processors, longest)
            cut_up = _Splits(splits, min(programs, splits), max(self._share, short.positions))
            launch(tiles.short, short, cut_up, (tiles.short_tokens, tiles.most_tokens))
        if len(tiles.long):
            launch(tiles.long, long, _Splits(1, 1, long.positions), (0, 0))
        return out_THD

    def _write(self, key_TGD: Tensor, value_TGD: Tensor, layer: LayerCache, slots_T: Tensor, turns: _Turns) -> None:
        tokens, kv_heads, head_dim = key_TGD.shape
        kernels.write_kv[(tokens, kv_heads)](
            key_TGD,
            value_TGD,
            layer.keys,
            layer.values,
            slots_T,
            *turns.tensors,
            *key_TGD.stride()[:2],
            *value_TGD.stride()[:2],
            turns.stride,
            G=kv_heads,
            D=head_dim,
            D2=padded_head(head_dim),
            S=layer.values.shape[2],
            **turns.constants,
            num_warps=WRITE_WARPS,
        )

    def _tiles_of(self, layout: StepLayout, most: tuple[int, int]) -> _Tiles:
        """``most``: tokens of a short tile and of a long one."""
        made = layout.made.get((_Tiles, most))
        if not isinstance(made, _Tiles):
            short, long = cut(layout.query_starts, layout.table_rows, *most)
            tiles = send(torch.tensor(short + long, dtype=torch.int32), layout.slots.device)
            counts = [tile[2] for tile in short]
            made = _Tiles(tiles[: len(short)], tiles[len(short) :], sum(counts), max(counts, default=0))
            layout.made[_Tiles, most] = made
        return made

    def _widens(self, dtype: torch.dtype) -> bool:
        """Triton's interpreter multiplies the bits of bf16 as if they were integers."""
        return self._interpreted and dtype == torch.bfloat16


@dataclass(frozen=True, slots=True)
class _Splits:
    """How the positions of a tile's sequence are shared out."""

    count: int
    programs: int
    """That compute them."""
    share: int
    """The least positions of one."""


@dataclass(frozen=True, slots=True)
class _Turns:
    """What kernels are given of rotary angles."""

    tensors: tuple[Tensor, Tensor]
    stride: int
    """From a token's angles to the next one's."""
    constants: dict[str, int]

    @classmethod
    def of(cls, rotary: Rotary | None, nothing: Tensor) -> _Turns:
        """``nothing``: what is named where nothing is turned; it is not read."""
        if rotary is None:
            return cls((nothing, nothing), 0, {"TURNED": 0, "PAIRS": False, "TOLD_ONCE": False})
        cosines, sines, turned = rotary.cosines, rotary.sines, rotary.turned
        assert cosines.stride() == sines.stride(), "rows of cosines are as far from one another as those of sines"
        told_once = cosines.shape[1] < turned
        constants = {"TURNED": turned, "PAIRS": rotary.pairs, "TOLD_ONCE": told_once}
        return cls((cosines, sines), cosines.stride(0), constants)


class _Launch:
    """One layer's attention, for the tiles of one phase after the other."""

    def __init__(
        self,
        query_THD: Tensor,
        layer: LayerCache,
        layout: StepLayout,
        out_THD: Tensor,
        scale: float,
        window: int,
        turns: _Turns,
        rules: ScoreRules,
        *,
        widen: bool,
    ) -> None:
        self._query_THD, self._layer, self._layout, self._out_THD = query_THD, layer, layout, out_THD
        self._scale, self._window, self._turns, self._rules, self._widen = scale, window, turns, rules, widen

    def __call__(self, tiles: Tensor, shape: Shape, cut_up: _Splits, tokens: tuple[int, int]) -> None:
        """``tokens``: those of all tiles, and the most of one, where positions are split."""
        query_THD, layer, layout, rules = self._query_THD, self._layer, self._layout, self._rules
        heads, head_dim = query_THD.shape[1:]
        kv_heads, block_tokens = layer.values.shape[1:3]
        parts, padded = -(-(heads // kv_heads) // shape.heads), padded_head(head_dim)
        partial = stats = nothing = self._out_THD  # where a kernel reads no table, any address will do
        bias, sinks = (nothing if table is None else table for table in (rules.bias_HL, rules.sinks_H))
        turns, splits = self._turns, cut_up.count
        if splits > 1:
            partial = torch.empty(tokens[0], heads, splits, padded, dtype=torch.float32, device=query_THD.device)
            stats = torch.empty(tokens[0], heads, splits, 2, dtype=torch.float32, device=query_THD.device)
        kernels.attend[(len(tiles), kv_heads * parts, cut_up.programs)](
            query_THD,
            layer.keys,
            layer.values,
            self._out_THD,
            partial,
            stats,
            tiles,
            layout.positions,
            layout.block_tables,
            *turns.tensors,
            bias,
            sinks,
            self._scale,
            rules.softcap,
            *query_THD.stride()[:2],
            turns.stride,
            layout.block_tables.shape[1],
            bias.shape[1],
            H=heads,
            G=kv_heads,
            D=head_dim,
            D2=padded,
            S=block_tokens,
            R=shape.heads,
            M=shape.rows,
            N=shape.positions,
            WINDOW=self._window,
            SPLITS=splits,
            SHARE=cut_up.share,
            CAPPED=rules.softcap != 0.0,
            BIASED=rules.bias_HL is not None,
            SINKS=rules.sinks_H is not None,
            **turns.constants,
            PRECISION=precision_of(query_THD.dtype),
            WIDEN=self._widen,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            maxnreg=shape.most_registers,
        )
        if splits > 1:
            self._combine(partial, stats, tiles, sinks, tokens[1])

    def _combine(self, partial: Tensor, stats: Tensor, tiles: Tensor, sinks: Tensor, tokens: int) -> None:
        """``tokens``: the most of a tile."""
        heads, head_dim = self._out_THD.shape[1:]
        kernels.combine[(len(tiles) * tokens, heads)](
            partial,
            stats,
            self._out_THD,
            tiles,
            sinks,
            tokens,
            H=heads,
            D=head_dim,
            D2=partial.shape[3],
            SPLITS=partial.shape[2],
            SINKS=self._rules.sinks_H is not None,
            num_warps=COMBINE_WARPS,
        )
