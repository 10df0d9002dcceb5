"""Attention over KV blocks, put behind transformers' modules.

Shapes.  T tokens of the step, all sequences flat   H query heads on this rank   G key/value heads on this rank
         D head size   B blocks in the pool         S positions per block        Q sequences in the step
         W width of the block tables                R features of a head that the rotary embedding turns
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from serve.errors import ConfigError

INTERFACE_NAME: Final = "tessera_paged"
_WITHOUT_MEANING: Final = frozenset(("dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states"))
"""Keywords of transformers' attention modules that change nothing here: the step's layout says what they would."""


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


Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of a step's positions, [T, R] each, contiguous: transformers' ``position_embeddings``."""


class Backend(Protocol):
    """One way to compute attention over blocks."""

    rotates: bool
    """Whether ``attend`` can turn queries and keys itself."""

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
    ) -> Tensor:
        """Write the step's keys and values into their slots, then attend.

        Causal attention of each token over its own sequence's cached positions; [T, H, D] in the query's type. With ``rotary``
        the first R features of queries and keys are turned first, in the convention of GPT-NeoX and Llama.
        """
        ...


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values.

    ``keys`` is [B, G, D, S], transposed inside a block so that a vector holds neighbouring positions; ``values`` [B, G, S, D].
    """

    keys: Tensor
    values: Tensor


class StepState:
    """The layout of the step being computed: the runner sets it, every layer's attention reads it."""

    __slots__ = ("layout", "rotary")

    def __init__(self) -> None:
        self.layout: StepLayout | None = None
        self.rotary: Rotary | None = None
        """What the layer being computed has left to the back end to turn its queries and keys with."""

    def postpone_rotary(
        self, query: Tensor, key: Tensor, cosines_1TR: Tensor, sines_1TR: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Stands in for transformers' ``apply_rotary_pos_emb``: the attention that follows turns queries and keys itself."""
        assert cosines_1TR.shape[-1] <= query.shape[-1], "check_rope refuses to turn more features than a head has"
        self.rotary = (cosines_1TR[0].contiguous(), sines_1TR[0].contiguous())
        return query, key


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
        rotary, self.state.rotary = self.state.rotary, None
        out_THD = self.backend.attend(
            query_1HTD[0].transpose(0, 1),
            key_1GTD[0].transpose(0, 1),
            value_1GTD[0].transpose(0, 1),
            self.cache,
            layout,
            scale=scale,
            window=window,
            rotary=rotary,
        )
        return out_THD.unsqueeze(0)


class TorchBackend:
    """Attention in plain torch operations: every device, every type; gathers each sequence's blocks."""

    rotates = False

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
    ) -> Tensor:
        """See ``Backend``."""
        assert rotary is None, "queries and keys come turned already"
        block_tokens = layer.values.shape[2]
        block, offset = layout.slots // block_tokens, layout.slots % block_tokens
        layer.keys[block, :, :, offset] = key_TGD
        layer.values[block, :, offset] = value_TGD
        out_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype, device=query_THD.device)
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
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("query_stride_token", ctypes.c_int64),
        ("query_stride_head", ctypes.c_int64),
        ("key_stride_token", ctypes.c_int64),
        ("key_stride_head", ctypes.c_int64),
        ("value_stride_token", ctypes.c_int64),
        ("value_stride_head", ctypes.c_int64),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("key_cache", ctypes.c_void_p),
        ("value_cache", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("tiles", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("num_tiles", ctypes.c_int64),
        ("table_width", ctypes.c_int64),
        ("query_heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_tokens", ctypes.c_int64),
        ("rotary_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class CpuKernelBackend:
    """Attention by the C++ kernel: fp32 and bf16 on the CPU, nothing gathered."""

    rotates = True
    _TILE_TOKENS = 16

    def __init__(self, kernels: ctypes.CDLL) -> None:
        """``kernels`` as ``load_cpu_kernels`` gives them."""
        self._kernels = kernels
        self._kernels.tessera_attend.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Step))
        self._kernels.tessera_attend.restype = None
        self._max_rows = int(self._kernels.tessera_max_rows())
        self._tiles: tuple[StepLayout, int, Tensor] | None = None

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
    ) -> Tensor:
        """See ``Backend``."""
        query_THD, key_TGD, value_TGD = _rows(query_THD), _rows(key_TGD), _rows(value_TGD)
        # The kernel sees addresses alone.
        assert {key_TGD.dtype, value_TGD.dtype, layer.keys.dtype} == {query_THD.dtype}
        assert rotary is None or {part.dtype for part in rotary} == {query_THD.dtype}
        tokens, heads, width = query_THD.shape
        kv_heads, block_tokens = layer.values.shape[1:3]
        out_THD = torch.empty(tokens, heads, width, dtype=query_THD.dtype)
        tiles = self._tiles_of(layout, max(1, min(self._TILE_TOKENS, self._max_rows // (heads // kv_heads))))
        cosines, sines, turned = (rotary[0].data_ptr(), rotary[1].data_ptr(), rotary[0].shape[1]) if rotary else (None, None, 0)
        step = _Step(
            query_THD.data_ptr(),
            key_TGD.data_ptr(),
            value_TGD.data_ptr(),
            *query_THD.stride()[:2],
            *key_TGD.stride()[:2],
            *value_TGD.stride()[:2],
            cosines,
            sines,
            layout.slots.data_ptr(),
            layer.keys.data_ptr(),
            layer.values.data_ptr(),
            out_THD.data_ptr(),
            tiles.data_ptr(),
            layout.positions.data_ptr(),
            layout.block_tables.data_ptr(),
            tokens,
            tiles.shape[0],
            layout.block_tables.shape[1],
            heads,
            kv_heads,
            width,
            block_tokens,
            turned,
            window,
            scale,
        )
        self._kernels.tessera_attend(query_THD.dtype == torch.bfloat16, torch.get_num_threads(), ctypes.byref(step))
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


def _through_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """What transformers' attention modules call: q [1, H, T, D], k and v [1, G, T, D]; returns [1, T, H, D].

    Raises:
        ConfigError: the module asks for more than is computed here.
    """
    unknown = [name for name, value in others.items() if name not in _WITHOUT_MEANING and value is not None]
    if unknown or attention_mask is not None:
        asked = ", ".join(unknown or ["attention_mask"])
        raise ConfigError(
            f"{type(module).__name__} asks attention for {asked}, which is not computed; this model is not served"
        )
    attention: PagedAttention = module.tessera_attention  # type: ignore[assignment]  # nn.Module names modules and tensors only
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


def attach(module: nn.Module, attention: PagedAttention, *, replace_attn: bool, scale: float, rotary_function: str) -> None:
    """Give one attention module its paged attention.

    With ``replace_attn`` the module's ``_attn`` is replaced on the instance (families outside transformers' interface) and
    ``scale`` multiplies its scores; otherwise the module finds it through the interface, which brings its own scale.
    Where the back end can, it takes over what the module's forward does by ``rotary_function``.
    """
    if replace_attn:
        module._attn = _as_attn(attention, scale)  # type: ignore[assignment]  # a function where a module stood
    else:
        object.__setattr__(module, "tessera_attention", attention)
    if rotary_function and attention.backend.rotates:
        module.forward = _with_global(module, rotary_function, attention.state.postpone_rotary)


def _with_global(module: nn.Module, name: str, value: object) -> MethodType:
    """The module's own forward, one global name of which means something else; other modules are left as they are."""
    forward = inspect.unwrap(type(module).forward)
    assert name in forward.__code__.co_names, f"{type(module).__name__}.forward has no {name}"
    changed = FunctionType(
        forward.__code__, {**forward.__globals__, name: value}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(changed, module)
