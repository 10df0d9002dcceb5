"""Attention over KV blocks by the C++ kernel of ``kernels/attention.h``. Shapes: see ``serve.model.attention``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from serve.model.attention import PLAIN, LayerCache, Rotary, ScoreRules, StepLayout
from serve.model.recording import KINDS, Job, active

_ATTENTION: Final = KINDS.index("attention")

_LEAST_TOKENS: Final = 16
_TILES_PER_THREAD: Final = 4


class _Step(ctypes.Structure):
    """``Step`` of kernels/attention.h."""

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
        ("key_scales", ctypes.c_void_p),
        ("value_scales", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
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
        ("bias_positions", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class CpuKernelBackend:
    """Attention by the C++ kernel: fp32 and bf16 on the CPU, nothing gathered."""

    rotates = True
    rotates_by_any = False
    writes_alone = True
    keys_by_position = False

    def __init__(self, kernels: ctypes.CDLL) -> None:
        """``kernels`` as ``load_cpu_kernels`` gives them."""
        self._kernels = kernels
        self._kernels.tessera_attend.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Step))
        self._kernels.tessera_attend.restype = None
        self._max_rows = int(self._kernels.tessera_max_rows())

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
        """Write the step's keys and values into their slots, then attend, by one call of the kernel: [T, H, D] as the queries.

        Each token attends to its own sequence's positions up to its own. With ``rotary`` queries and keys are turned first.
        """
        query_THD, key_TGD, value_TGD = _rows(query_THD), _rows(key_TGD), _rows(value_TGD)
        _check_types(query_THD.dtype, (key_TGD, value_TGD), layer)
        tokens, heads, width = query_THD.shape
        kv_heads, block_tokens = layer.values.shape[1:3]
        _check_rules(rules, heads, max(layout.context_lengths, default=0), block_tokens)
        out_THD = torch.empty(tokens, heads, width, dtype=query_THD.dtype)
        tiles = self._tiles_of(layout, self._tile_tokens(tokens, heads, kv_heads))
        cosines, sines, turned = _angles(rotary, query_THD.dtype)
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
            _place(layer.key_scales),
            _place(layer.value_scales),
            out_THD.data_ptr(),
            _place(rules.sinks_H),
            _place(rules.bias_HL),
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
            0 if rules.bias_HL is None else rules.bias_HL.shape[1],
            scale,
            rules.softcap,
        )
        self._call(query_THD.dtype == torch.bfloat16, step)
        return out_THD

    @staticmethod
    def lies_by_token(job: Job) -> bool:
        """Whether what a recorded call reads and writes lies one token behind the other, so that another number may follow."""
        step = _Step.from_address(job.y)
        parts = (
            (step.query_heads, step.query_stride_token, step.query_stride_head),
            (step.kv_heads, step.key_stride_token, step.key_stride_head),
            (step.kv_heads, step.value_stride_token, step.value_stride_head),
        )
        return all(heads == 1 or token >= head for heads, token, head in parts)

    def turn_to(self, job: Job, layout: StepLayout) -> None:
        """Let a recorded call attend by another layout, of as many tokens as its inputs have by then."""
        step = _Step.from_address(job.y)
        step.tokens = layout.query_starts[-1]
        tiles = self._tiles_of(layout, self._tile_tokens(step.tokens, step.query_heads, step.kv_heads))
        step.tiles, step.num_tiles = tiles.data_ptr(), tiles.shape[0]
        step.slots, step.positions = layout.slots.data_ptr(), layout.positions.data_ptr()
        step.tables, step.table_width = layout.block_tables.data_ptr(), layout.block_tables.shape[1]
        most = max(layout.context_lengths, default=0)
        assert not step.bias or -(-most // step.block_tokens) * step.block_tokens <= step.bias_positions

    def _call(self, is_bf16: bool, step: _Step) -> None:
        self._kernels.tessera_attend(is_bf16, torch.get_num_threads(), ctypes.byref(step))
        if (recorder := active()) is not None:
            recorder.note(Job(_ATTENTION, is_bf16, None, ctypes.addressof(step)), step)

    def _tile_tokens(self, tokens: int, heads: int, kv_heads: int) -> int:
        """Many, so that what is read of the cache serves many rows, where that leaves every thread some tiles."""
        shared = tokens * kv_heads // (_TILES_PER_THREAD * torch.get_num_threads())
        return max(1, min(self._max_rows // (heads // kv_heads), max(_LEAST_TOKENS, shared)))

    def _tiles_of(self, layout: StepLayout, tile_tokens: int) -> Tensor:
        """int32 [items, 3] of (row of its table, first token, tokens): the same for every layer of a step, so made once."""
        made = layout.made.get(tile_tokens)
        if made is None:
            starts = layout.query_starts
            tiles = [
                (row, first, min(tile_tokens, starts[i + 1] - first))
                for i, row in enumerate(layout.table_rows)
                for first in range(starts[i], starts[i + 1], tile_tokens)
            ]
            make = partial(torch.tensor, tiles, dtype=torch.int32)
            recorder = active()
            flat = make() if recorder is None else recorder.unrecorded(make)
            layout.made[tile_tokens] = made = flat.view(-1, 3)
        assert isinstance(made, Tensor)
        return made


def _place(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _angles(rotary: Rotary | None, dtype: torch.dtype) -> tuple[int | None, int | None, int]:
    """Where cosines and sines are, and how many features they turn."""
    if rotary is None:
        return None, None, 0
    assert rotary.is_plain, "other angles are the module's to turn by"
    assert rotary.cosines.dtype == rotary.sines.dtype == dtype, "angles come in the type of what they turn"
    return rotary.cosines.data_ptr(), rotary.sines.data_ptr(), rotary.turned


def _check_types(dtype: torch.dtype, others: Sequence[Tensor], layer: LayerCache) -> None:
    """The kernel sees addresses alone: what it is given must be of the type of the queries."""
    assert {part.dtype for part in others} == {dtype}
    assert layer.keys.dtype == (dtype if layer.key_scales is None else torch.int8)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _check_rules(rules: ScoreRules, heads: int, context: int, block_tokens: int) -> None:
    """Tables that the kernel reads by address have its type, one row or number for each head, and whole blocks of positions."""
    sinks_H, bias_HL = rules.sinks_H, rules.bias_HL
    assert sinks_H is None or (sinks_H.dtype == torch.float32 and sinks_H.shape == (heads,) and sinks_H.is_contiguous())
    assert bias_HL is None or (bias_HL.dtype == torch.float32 and bias_HL.shape[0] == heads and bias_HL.is_contiguous())
    assert bias_HL is None or -(-context // block_tokens) * block_tokens <= bias_HL.shape[1]
