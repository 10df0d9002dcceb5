"""Attention over KV blocks by the Triton kernels of ``kernels``: one back end for every CUDA device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from serve.model.attention import PLAIN, LayerCache, Rotary, ScoreRules, StepLayout
from serve.model.cuda import kernels
from serve.model.cuda.tiling import Shape, cut, power_of_two, shape_of, splits_for


@dataclass(frozen=True, slots=True)
class _Tiles:
    """A step's tiles on the device, int32 [tiles, 3] each; the same for all layers."""

    short: Tensor
    long: Tensor


class TritonBackend:
    """Attention by Triton kernels: fp16, bf16 and fp32, on CUDA devices, nothing gathered.

    Needs Triton, which torch for CUDA brings. Under its interpreter (``TRITON_INTERPRET=1``) it computes on the CPU, slowly.
    """

    rotates = False

    def __init__(self, processors: int, *, splits: int | None = None) -> None:
        """
        Args:
            processors: multiprocessors of the device.
            splits: among how many programs positions are split in decoding, a power of two; ``None`` chooses by the tiles.
        """
        self._processors = processors
        self._splits = splits
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
        """See ``Backend``."""
        assert rotary is None, "queries and keys come turned already"
        query_THD, key_TGD, value_TGD = (
            part if part.stride(-1) == 1 else part.contiguous() for part in (query_THD, key_TGD, value_TGD)
        )
        self._write(key_TGD, value_TGD, layer, layout.slots)
        out_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype, device=query_THD.device)
        heads, kv_heads, head_dim = query_THD.shape[1], key_TGD.shape[1], query_THD.shape[2]
        group = heads // kv_heads
        ruled = rules.softcap != 0.0 or rules.bias_HL is not None
        short, long = (shape_of(query_THD.dtype, head_dim, group, long=phase, rules=ruled) for phase in (False, True))
        tiles = self._tiles_of(layout, (short.rows // group, long.rows // group))
        launch = _Launch(query_THD, layer, layout, out_THD, scale, window, rules, widen=self._widens(query_THD.dtype))
        if len(tiles.short):
            splits = self._splits or splits_for(len(tiles.short), kv_heads, self._processors)
            launch(tiles.short, short, splits)
        if len(tiles.long):
            launch(tiles.long, long, 1)
        return out_THD

    def _write(self, key_TGD: Tensor, value_TGD: Tensor, layer: LayerCache, slots_T: Tensor) -> None:
        tokens, kv_heads, head_dim = key_TGD.shape
        kernels.write_kv[(tokens, kv_heads)](
            key_TGD,
            value_TGD,
            layer.keys,
            layer.values,
            slots_T,
            *key_TGD.stride()[:2],
            *value_TGD.stride()[:2],
            G=kv_heads,
            D=head_dim,
            D2=power_of_two(head_dim),
            S=layer.values.shape[2],
        )

    def _tiles_of(self, layout: StepLayout, most: tuple[int, int]) -> _Tiles:
        """``most``: tokens of a short tile and of a long one."""
        made = layout.made.get((_Tiles, most))
        if not isinstance(made, _Tiles):
            short, long = cut(layout.query_starts, layout.table_rows, *most)
            tiles = torch.tensor(short + long, dtype=torch.int32).to(layout.slots.device, non_blocking=True)
            layout.made[_Tiles, most] = made = _Tiles(tiles[: len(short)], tiles[len(short) :])
        return made

    def _widens(self, dtype: torch.dtype) -> bool:
        """Triton's interpreter multiplies the bits of bf16 as if they were integers."""
        return self._interpreted and dtype == torch.bfloat16


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
        rules: ScoreRules,
        *,
        widen: bool,
    ) -> None:
        self._query_THD, self._layer, self._layout, self._out_THD = query_THD, layer, layout, out_THD
        self._scale, self._window, self._rules, self._widen = scale, window, rules, widen

    def __call__(self, tiles: Tensor, shape: Shape, splits: int) -> None:
        query_THD, layer, layout, rules = self._query_THD, self._layer, self._layout, self._rules
        tokens, heads, head_dim = query_THD.shape
        kv_heads, block_tokens = layer.values.shape[1:3]
        padded = power_of_two(head_dim)
        nothing = self._out_THD  # where a kernel reads no table, any address will do
        partial, stats = nothing, nothing
        if splits > 1:
            partial = torch.empty(tokens, heads, splits, padded, dtype=torch.float32, device=query_THD.device)
            stats = torch.empty(tokens, heads, splits, 2, dtype=torch.float32, device=query_THD.device)
        kernels.attend[(len(tiles), kv_heads, splits)](
            query_THD,
            layer.keys,
            layer.values,
            self._out_THD,
            partial,
            stats,
            tiles,
            layout.positions,
            layout.block_tables,
            nothing if rules.bias_HL is None else rules.bias_HL,
            nothing if rules.sinks_H is None else rules.sinks_H,
            self._scale,
            rules.softcap,
            *query_THD.stride()[:2],
            layout.block_tables.shape[1],
            0 if rules.bias_HL is None else rules.bias_HL.shape[1],
            H=heads,
            G=kv_heads,
            D=head_dim,
            D2=padded,
            S=block_tokens,
            M=shape.rows,
            N=shape.positions,
            WINDOW=self._window,
            SPLITS=splits,
            CAPPED=rules.softcap != 0.0,
            BIASED=rules.bias_HL is not None,
            SINKS=rules.sinks_H is not None,
            PRECISION="ieee" if query_THD.dtype == torch.float32 else "tf32",
            WIDEN=self._widen,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
        if splits > 1:
            most = shape.rows // (heads // kv_heads)
            kernels.combine[(len(tiles) * most, heads)](
                partial,
                stats,
                self._out_THD,
                tiles,
                nothing if rules.sinks_H is None else rules.sinks_H,
                H=heads,
                D=head_dim,
                D2=padded,
                SPLITS=splits,
                TOKENS=most,
                SINKS=rules.sinks_H is not None,
            )
