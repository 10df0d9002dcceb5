"""Attention over KV blocks, put behind transformers' modules.

Shapes.  T tokens of the step, all sequences flat   H query heads on this rank   G key/value heads on this rank
         D head size   B blocks in the pool         S positions per block        Q sequences in the step
         W width of the block tables
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from serve.model.kernels.build import load_cpu_kernels

INTERFACE_NAME: Final = "tessera_paged"


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
    """int32 [Q, W]: block ids of each sequence in order of position, padded with 0."""


class Backend(Protocol):
    """One way to compute attention over blocks."""

    def store(self, key_TGD: Tensor, value_TGD: Tensor, layer: LayerCache, layout: StepLayout) -> None: ...

    def attend(self, query_THD: Tensor, layer: LayerCache, layout: StepLayout, scale: float, window: int) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values.

    ``keys`` is [B, G, D, S], transposed inside a block so that a vector holds neighbouring positions; ``values`` [B, G, S, D].
    """

    keys: Tensor
    values: Tensor


class StepState:
    """The layout of the step being computed: the runner sets it, every layer's attention reads it."""

    __slots__ = ("layout",)

    def __init__(self) -> None:
        self.layout: StepLayout | None = None


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """One layer's attention: its cache, its window, and the state it shares with the other layers."""

    cache: LayerCache
    state: StepState
    backend: Backend
    window: int = 0
    """0: all earlier positions are seen; else position p sees (p - window, p]."""

    def __call__(self, query_1HTD: Tensor, key_1GTD: Tensor, value_1GTD: Tensor, scale: float, window: int) -> Tensor:
        """Write the step's keys and values, then attend; returns [1, T, H, D]."""
        layout = self.state.layout
        assert layout is not None, "attention was called outside a step"
        self.backend.store(key_1GTD[0].transpose(0, 1), value_1GTD[0].transpose(0, 1), self.cache, layout)
        return self.backend.attend(query_1HTD[0].transpose(0, 1), self.cache, layout, scale, window).unsqueeze(0)


class TorchBackend:
    """Attention in plain torch operations: every device, every type; gathers each sequence's blocks."""

    def store(self, key_TGD: Tensor, value_TGD: Tensor, layer: LayerCache, layout: StepLayout) -> None:
        """Write the step's keys and values into their slots."""
        block_tokens = layer.values.shape[2]
        block, offset = layout.slots // block_tokens, layout.slots % block_tokens
        layer.keys[block, :, :, offset] = key_TGD
        layer.values[block, :, offset] = value_TGD

    def attend(self, query_THD: Tensor, layer: LayerCache, layout: StepLayout, scale: float, window: int) -> Tensor:
        """Causal attention of each token over its own sequence's cached positions; returns [T, H, D] in the query's type."""
        out_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype, device=query_THD.device)
        block_tokens = layer.values.shape[2]
        for i, length in enumerate(layout.context_lengths):
            begin, end = layout.query_starts[i], layout.query_starts[i + 1]
            first = max(0, length - (end - begin) - window + 1) // block_tokens if window else 0
            table = layout.block_tables[i, first : -(-length // block_tokens)].long()
            low = first * block_tokens
            # Slots past the sequence's end may hold anything, NaN included: they are cut off, not masked.
            key_GLD = layer.keys[table].permute(1, 0, 3, 2).flatten(1, 2)[:, : length - low]
            value_GLD = layer.values[table].permute(1, 0, 2, 3).flatten(1, 2)[:, : length - low]
            row = layout.positions[begin:end, None]
            column = torch.arange(low, length, device=row.device)[None, :]
            seen = column <= row
            if window:
                seen &= column > row - window
            out_THD[begin:end] = nn.functional.scaled_dot_product_attention(
                query_THD[begin:end].transpose(0, 1)[None],
                key_GLD[None],
                value_GLD[None],
                attn_mask=seen,
                scale=scale,
                enable_gqa=key_GLD.shape[0] != query_THD.shape[1],
            )[0].transpose(0, 1)
        return out_THD


class _Step(ctypes.Structure):
    """``Step`` of kernels/attention.cpp."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("query_stride_token", ctypes.c_int64),
        ("query_stride_head", ctypes.c_int64),
        ("key_cache", ctypes.c_void_p),
        ("value_cache", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("tiles", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("num_tiles", ctypes.c_int64),
        ("table_width", ctypes.c_int64),
        ("query_heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_tokens", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class CpuKernelBackend:
    """Attention by the C++ kernel: fp32 and bf16 on the CPU, nothing gathered."""

    _TILE_TOKENS = 16

    def __init__(self) -> None:
        """
        Raises:
            KernelUnavailable: it cannot be built here.
        """
        self._kernels = load_cpu_kernels()
        self._max_rows = int(self._kernels.tessera_max_rows())
        self._tiles: tuple[StepLayout, int, Tensor] | None = None

    def store(self, key_TGD: Tensor, value_TGD: Tensor, layer: LayerCache, layout: StepLayout) -> None:
        """Write the step's keys and values into their slots."""
        key_TGD, value_TGD = _rows(key_TGD), _rows(value_TGD)
        self._kernels.tessera_store(
            ctypes.c_int(key_TGD.dtype == torch.bfloat16),
            *_strided(key_TGD),
            *_strided(value_TGD),
            ctypes.c_void_p(layer.keys.data_ptr()),
            ctypes.c_void_p(layer.values.data_ptr()),
            ctypes.c_void_p(layout.slots.data_ptr()),
            *(ctypes.c_int64(n) for n in (*key_TGD.shape, layer.values.shape[2])),
        )

    def attend(self, query_THD: Tensor, layer: LayerCache, layout: StepLayout, scale: float, window: int) -> Tensor:
        """Causal attention of each token over its own sequence's cached positions; returns [T, H, D] in the query's type."""
        query_THD = _rows(query_THD)
        heads, kv_heads = query_THD.shape[1], layer.keys.shape[1]
        out_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype)
        tiles = self._tiles_of(layout, max(1, min(self._TILE_TOKENS, self._max_rows // (heads // kv_heads))))
        step = _Step(
            query_THD.data_ptr(),
            query_THD.stride(0),
            query_THD.stride(1),
            layer.keys.data_ptr(),
            layer.values.data_ptr(),
            out_THD.data_ptr(),
            tiles.data_ptr(),
            layout.positions.data_ptr(),
            layout.block_tables.data_ptr(),
            tiles.shape[0],
            layout.block_tables.shape[1],
            heads,
            kv_heads,
            query_THD.shape[2],
            layer.values.shape[2],
            window,
            scale,
        )
        self._kernels.tessera_attend(
            ctypes.c_int(query_THD.dtype == torch.bfloat16), ctypes.c_int(torch.get_num_threads()), ctypes.byref(step)
        )
        return out_THD

    def _tiles_of(self, layout: StepLayout, tile_tokens: int) -> Tensor:
        """int32 [items, 3] of (sequence, first token, tokens): the same for every layer of a step, so made once."""
        if self._tiles is None or self._tiles[0] is not layout or self._tiles[1] != tile_tokens:
            starts = layout.query_starts
            tiles = [
                (i, first, min(tile_tokens, starts[i + 1] - first))
                for i in range(len(starts) - 1)
                for first in range(starts[i], starts[i + 1], tile_tokens)
            ]
            self._tiles = (layout, tile_tokens, torch.tensor(tiles, dtype=torch.int32))
        return self._tiles[2]


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strided(tensor: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]:
    return ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(tensor.stride(0)), ctypes.c_int64(tensor.stride(1))


def _through_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers' attention modules call: q [1, H, T, D], k and v [1, G, T, D]; returns [1, T, H, D]."""
    attention: PagedAttention = module.tessera_attention  # type: ignore[assignment]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return attention(query, key, value, scale, sliding_window or 0), None


def _as_attn(attention: PagedAttention, scale: float) -> Callable[..., tuple[Tensor, None]]:
    """A replacement for the ``_attn`` of GPT-J and GPT-Neo, which want [1, H, T, D] back."""

    def attn(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        return attention(query, key, value, scale, attention.window).transpose(1, 2), None

    return attn


def register_interface() -> None:
    """Make ``tessera_paged`` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(INTERFACE_NAME, _through_interface)


def attach(module: nn.Module, attention: PagedAttention, *, replace_attn: bool, scale: float) -> None:
    """Give one attention module its paged attention.

    With ``replace_attn`` the module's ``_attn`` is replaced on the instance (families outside transformers' interface) and
    ``scale`` multiplies its scores; otherwise the module finds it through the interface, which brings its own scale.
    """
    if replace_attn:
        module._attn = _as_attn(attention, scale)  # type: ignore[assignment]
    else:
        object.__setattr__(module, "tessera_attention", attention)
