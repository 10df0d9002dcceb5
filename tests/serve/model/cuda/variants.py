"""Which variants of ``kernels.attend`` are compiled, out of all that may be launched. Needs no Triton.

A launch is of a type, a head size, a group of query heads, a phase, rules for scores, a type of the cache and a kind of angles:
tens of thousands of variants, of which each takes a second to compile. So what takes most registers is compiled with everything
(a window, a soft-cap, biases and sinks at once), what families have is compiled as they have it, and what differs from another
by less, for some head sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final

import torch

HEAD_SIZES: Final = (8, 32, 64, 80, 96, 128, 160, 256)
"""Those of the models that ``test_head_sizes`` knows, and that of the tests' own."""
FULL: Final = (64, 80, 128, 256)
"""Compiled in every way: 96 is computed with as 80 is, in the shape of 80, 160 as 256, and smaller ones take less than 64."""
FP8_FROM: Final = 89
"""The compute capability below which nothing converts fp8."""
PHASES: Final = ("decode", "decode unsplit", "prefill")
"""A token or a few of each sequence, its positions in splits or not; and many tokens."""
NAMES: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to launch ``kernels.attend``."""

    dtype: torch.dtype
    head_dim: int
    phase: str
    group: int = 4
    window: bool = False
    capped: bool = False
    biased: bool = False
    sinks: bool = False
    fp8: bool = False
    angles: str = "halves"
    """``halves`` of all of a head, as Llama turns them; ``told once`` likewise, as GPT-OSS has them; ``pairs`` by fp32, more of
    them than GPT-J and CodeGen have; ``none``."""

    @property
    def name(self) -> str:
        """Every one that differs from another has another."""
        of = f"{NAMES[self.dtype]}, head size {self.head_dim}, {self.phase}, groups of {self.group}"
        rules = ("window", "capped", "biased", "sinks")
        said = [rule for rule in rules if getattr(self, rule)]
        words = ["all rules"] if len(said) == len(rules) else said
        words += ["fp8"] if self.fp8 else []
        words += [] if self.angles == "halves" else [f"angles {self.angles}"]
        return ", ".join([of, *words])


_ALL_RULES: Final = dict.fromkeys(("window", "capped", "biased", "sinks"), True)


def attention_variants(architecture: int) -> dict[str, Variant]:
    """Those for a compute capability, by name."""
    found = [*_of_every_head_size(), *_of_full_head_sizes(), *_of_families()]
    return {each.name: each for each in found if architecture >= FP8_FROM or not each.fp8}


def _of_every_head_size() -> Iterator[Variant]:
    bf16 = torch.bfloat16
    for head_dim, phase in product(HEAD_SIZES, PHASES):
        yield Variant(bf16, head_dim, phase)
        yield Variant(bf16, head_dim, phase, **_ALL_RULES)
        yield Variant(bf16, head_dim, phase, fp8=True)
        if phase != "prefill":  # the tiles of fp32 are the same in all phases
            yield Variant(torch.float32, head_dim, phase)
            yield Variant(torch.float32, head_dim, phase, **_ALL_RULES)


def _of_full_head_sizes() -> Iterator[Variant]:
    """One query head of a key/value head, and groups of eight; a window alone; types of the cache."""
    bf16, fp16 = torch.bfloat16, torch.float16
    for head_dim, phase in product(FULL, PHASES):
        yield Variant(bf16, head_dim, phase, 1)
        yield Variant(bf16, head_dim, phase, 1, fp8=True)
        yield Variant(bf16, head_dim, phase, fp8=True, **_ALL_RULES)
        yield Variant(fp16, head_dim, phase, 1)
        yield Variant(fp16, head_dim, phase, 1, fp8=True)
        yield Variant(fp16, head_dim, phase, **_ALL_RULES)
        if phase != "prefill":
            yield Variant(torch.float32, head_dim, phase, 1)
            yield Variant(torch.float32, head_dim, phase, window=True)
            yield Variant(bf16, head_dim, phase, 8)
        if phase != "decode unsplit":
            yield Variant(bf16, head_dim, phase, 1, window=True)
            yield Variant(bf16, head_dim, phase, window=True)


def _of_families() -> Iterator[Variant]:
    bf16 = torch.bfloat16
    for head_dim, phase in product((128, 256), PHASES):  # Gemma 2
        yield Variant(bf16, head_dim, phase, 2, capped=True)
        yield Variant(bf16, head_dim, phase, 2, window=True, capped=True)
    for head_dim, phase in product(FULL, ("decode", "prefill")):  # BLOOM, and Falcon with ALiBi
        yield Variant(bf16, head_dim, phase, 1, biased=True, angles="none")
    for phase in PHASES:
        yield Variant(bf16, 96, phase, 1, window=True)  # Phi-3
        yield Variant(bf16, 64, phase, 8, sinks=True, angles="told once")  # GPT-OSS
        yield Variant(bf16, 64, phase, 8, window=True, sinks=True, angles="told once")
        yield Variant(bf16, 64, phase, 71)  # Falcon
        yield Variant(bf16, 128, phase, 48, angles="none")  # GPT-BigCode
        for head_dim in (64, 80, 256):  # CodeGen, GPT-J
            yield Variant(bf16, head_dim, phase, 1, angles="pairs")
