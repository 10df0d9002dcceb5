"""What the Triton kernels are tried with. Needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

SPANS: Final = ((1, 1), (70, 1), (37, 20), (33, 3))
"""(positions after the step, tokens in it) of each sequence."""
TOLERANCE: Final = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of bf16 one unit in the last place of numbers below 2."""

WIDE_HEAD_TOLERANCE: Final = 1e-5
"""In fp32 of heads of 256 features: sums of so many products are further apart where they are added in another order."""
TURNED_TOLERANCE: Final = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""How far keys that the kernels turned on a GPU may be from those that torch turned."""


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    window: int = 0
    splits: int = 1
    softcap: float = 0.0
    bias: bool = False
    sinks: bool = False
    strided: bool = False
    """Whether queries, keys and values are views of one fused tensor, heads outside."""
    padded: int = 0
    """Tokens behind the step's own that have no sequence."""
    spans: tuple[tuple[int, int], ...] = SPANS
    block_tokens: int = 16
    fp8: bool = False
    """Whether keys and values are kept in fp8."""
    turned: int = 0
    """How many features of queries and keys the kernels turn by rotary angles."""
    pairs: bool = False
    """Whether neighbours are turned together, by angles that are told once."""
    wide_angles: bool = False
    """Whether angles are in fp32, whatever is turned."""
    told_once: bool = False
    """Whether angles of halves are told once for two features, as those of pairs always are."""
    spoiled: str = ""
    """What of the first sequence's newest token is NaN, a ``key`` or a ``query``: so must be what comes of it."""

    @property
    def tolerance(self) -> float:
        """How far outputs may be from plain torch's, those beyond 1 as a share of them."""
        if self.head_dim > 128 and self.dtype == torch.float32:
            return WIDE_HEAD_TOLERANCE
        return TOLERANCE[self.dtype]

    @property
    def device_tolerance(self) -> float:
        """The same on a GPU, which adds and turns in another order: in bf16 a unit more, and what turned keys are off."""
        if self.dtype != torch.bfloat16:
            return self.tolerance
        return 2 * self.tolerance + (TURNED_TOLERANCE[self.dtype] if self.turned else 0.0)


FAMILIES: Final = {
    "GPT-2, fp16": Case(dtype=torch.float16, heads=2, splits=4, strided=True),
    "Pythia 2.8B": Case(dtype=torch.bfloat16, heads=2, head_dim=80, turned=20, splits=4, strided=True),
    "GPT-NeoX 20B, fp16": Case(dtype=torch.float16, heads=2, head_dim=96, turned=24, splits=4, strided=True),
    "Pythia 6.9B": Case(dtype=torch.bfloat16, heads=2, head_dim=128, turned=32, splits=4, strided=True),
    "Pythia 1B": Case(dtype=torch.bfloat16, heads=2, head_dim=256, turned=64, splits=2, strided=True),
    "GPT-Neo": Case(dtype=torch.float16, heads=2, head_dim=128, window=24),
    "GPT-J, fp16": Case(dtype=torch.float16, heads=2, head_dim=256, turned=64, pairs=True, splits=4),
    "CodeGen, fp8 cache": Case(
        dtype=torch.bfloat16, heads=2, head_dim=256, turned=64, pairs=True, wide_angles=True, splits=2, fp8=True
    ),
    "BLOOM": Case(dtype=torch.bfloat16, heads=2, head_dim=128, bias=True, splits=4),
    "BLOOM, fp8 cache": Case(dtype=torch.float16, heads=2, head_dim=64, bias=True, splits=4, fp8=True),
    "Falcon 7B": Case(dtype=torch.bfloat16, heads=71, kv_heads=1, turned=64, splits=2, spans=((40, 1), (20, 3))),
    "Phi-3, a fused projection": Case(
        dtype=torch.bfloat16, heads=2, kv_heads=2, head_dim=96, turned=96, window=30, splits=4, strided=True
    ),
    "Llama 3": Case(dtype=torch.bfloat16, heads=8, head_dim=128, turned=128, splits=4),
    "Llama 3, fp8 cache, padded rows": Case(
        dtype=torch.bfloat16, heads=8, head_dim=128, turned=128, splits=2, fp8=True, padded=3
    ),
    "Mistral, fp8 cache, fp16": Case(dtype=torch.float16, heads=8, head_dim=128, turned=128, window=24, splits=4, fp8=True),
    "Gemma 2 9B": Case(dtype=torch.bfloat16, head_dim=256, softcap=5.0, window=24, turned=256, splits=4),
    "Gemma 2 27B, fp32": Case(head_dim=128, softcap=5.0, turned=128, splits=2),
    "GPT-OSS, fp8 cache": Case(
        dtype=torch.bfloat16, heads=8, kv_heads=1, sinks=True, window=24, turned=64, told_once=True, splits=4, fp8=True
    ),
    "GPT-OSS, padded rows": Case(dtype=torch.bfloat16, heads=8, kv_heads=1, sinks=True, turned=64, told_once=True, padded=3),
    "GPT-BigCode": Case(dtype=torch.float16, heads=16, kv_heads=1, head_dim=128, splits=4),
}
"""Attention as models have it, in 16 bits and shares: head size, groups, what is turned, rules and caches together."""

CASES: Final = FAMILIES | {
    "plain": Case(),
    "one key/value head for all": Case(heads=8, kv_heads=1),
    "a group that is no power of two": Case(heads=6, kv_heads=2),
    "as many key/value heads as heads": Case(heads=3, kv_heads=3),
    "a group larger than a tile": Case(heads=20, kv_heads=1, head_dim=16),
    "a group of 71, in splits": Case(heads=71, kv_heads=1, head_dim=16, splits=4, spans=((70, 1), (33, 2))),
    "head size 8": Case(head_dim=8, splits=2),
    "head size 80": Case(head_dim=80, heads=2),
    "head size 96": Case(head_dim=96, heads=2),
    "head size 128": Case(head_dim=128, heads=2),
    "head size 256": Case(head_dim=256, heads=2, kv_heads=1),
    "head size 20": Case(head_dim=20),
    "fp16": Case(dtype=torch.float16),
    "bf16": Case(dtype=torch.bfloat16),
    "bf16 in splits": Case(dtype=torch.bfloat16, splits=4, head_dim=80),
    "fp8 cache": Case(dtype=torch.bfloat16, fp8=True),
    "fp8 cache in splits, head size 80": Case(dtype=torch.float16, fp8=True, splits=4, head_dim=80),
    "two splits": Case(splits=2),
    "more splits than positions": Case(splits=16, spans=((3, 1), (18, 1))),
    "window": Case(window=20),
    "window in splits": Case(window=20, splits=4),
    "window longer than all": Case(window=100),
    "window of one": Case(window=1, heads=2),
    "soft-cap": Case(softcap=5.0),
    "soft-cap in splits, fp16": Case(softcap=5.0, splits=2, dtype=torch.float16),
    "ALiBi": Case(bias=True),
    "ALiBi in splits": Case(bias=True, splits=4),
    "sinks": Case(sinks=True),
    "sinks in splits": Case(sinks=True, splits=4),
    "all rules at once": Case(softcap=5.0, bias=True, sinks=True, window=20, splits=2),
    "a fused projection": Case(strided=True),
    "padded rows": Case(padded=3, splits=2),
    "blocks of 8": Case(block_tokens=8),
    "blocks of 32": Case(block_tokens=32),
    "prefill longer than a tile": Case(spans=((150, 150), (40, 40)), dtype=torch.float16, heads=2, kv_heads=1),
    "turned": Case(turned=64),
    "turned in part, in splits": Case(head_dim=80, heads=2, turned=32, splits=2),
    "ten pairs turned": Case(turned=20, dtype=torch.float16),
    "turned, a fused projection": Case(turned=64, dtype=torch.bfloat16, strided=True),
    "pairs turned": Case(head_dim=64, heads=2, turned=32, pairs=True),
    "pairs turned by fp32, in bf16": Case(turned=16, pairs=True, dtype=torch.bfloat16, wide_angles=True),
    "turned by fp32, in fp16": Case(turned=64, dtype=torch.float16, wide_angles=True),
    "turned by angles told once": Case(turned=64, told_once=True, splits=2),
    "a key that is no number, alone in its share": Case(splits=4, spans=((33, 1), (20, 1)), spoiled="key"),
    "such a key, which is all that is seen": Case(splits=4, spans=((33, 1), (20, 1)), window=1, spoiled="key"),
    "a query that is no number": Case(splits=4, spans=((40, 1), (20, 1)), spoiled="query"),
    "turned, padded rows": Case(turned=16, padded=3, splits=2),
    "turned, prefill longer than a tile": Case(turned=64, spans=((150, 150),), dtype=torch.float16, heads=2, kv_heads=1),
    "prefill behind a cached prefix": Case(spans=((90, 50),), dtype=torch.float16, window=30),
}


def _at_length(head_dim: int, dtype: torch.dtype, *, fp8: bool) -> Case:
    """Sequences as long as those that are served: of a few shares, of one, a prompt, and a chunk behind a prefix."""
    rules = {80: {"window": 500}, 96: {"bias": True}, 256: {"softcap": 5.0}}.get(head_dim, {})
    spans = ((1500, 1), (300, 1), (270, 270), (900, 150))
    return Case(heads=8, head_dim=head_dim, dtype=dtype, fp8=fp8, splits=8, spans=spans, turned=head_dim // 4, **rules)


ON_A_DEVICE: Final = {
    f"head size {head_dim}, {str(dtype).removeprefix('torch.')}{', fp8 cache' * fp8}, at length": _at_length(
        head_dim, dtype, fp8=fp8
    )
    for head_dim in (64, 80, 96, 128, 256)
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    for fp8 in (False, True)
    if not fp8 or dtype != torch.float32
}
"""Too long for the interpreter."""

STEPS: Final = {
    "plain": Case(head_dim=16),
    "window": Case(head_dim=16, window=40),
    "all rules": Case(heads=2, kv_heads=1, head_dim=16, softcap=5.0, bias=True, sinks=True, window=200),
    "sinks": Case(heads=2, kv_heads=1, head_dim=16, sinks=True),
}
"""What the inputs of captured steps are tried with."""
