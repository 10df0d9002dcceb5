"""What attention over blocks costs in a prompt's step: ``python -m benchmarks.attention``.

One layer's attention of prompts of several shapes: the compiled kernel, which also writes the step's keys and values to their
blocks, and torch's ``scaled_dot_product_attention`` over keys and values that lie side by side, in turns in one process.
``--beside LIBRARY`` takes turns with kernels that were built from other sources, of the same interface. Kernels of another
level than the processor's best (``--level x86-64-v3``) are compiled into a folder for the run.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from benchmarks import kernels
from serve.model.attention import StepLayout
from serve.model.kernel_attention import CpuKernelBackend
from serve.worker.kv_cache import allocate

BLOCK_TOKENS: Final = 16


@dataclass(frozen=True)
class Heads:
    """Heads of a layer: those of queries, those of keys and values, and their size."""

    queries: int
    keys: int
    size: int


@dataclass(frozen=True)
class Work:
    """Sequences of a step, all alike: how many, their tokens in this step, and the positions that the cache has of them."""

    sequences: int
    tokens: int
    before: int = 0


SHAPES: Final = {
    "12 heads of 64": Heads(12, 12, 64),
    "16 heads of 64": Heads(16, 16, 64),
    "16 heads of 64, 4 of keys": Heads(16, 4, 64),
    "16 heads of 128": Heads(16, 16, 128),
}
WORKS: Final = {
    "1 x 1,024": Work(1, 1024),
    "8 x 512": Work(8, 512),
    "256 after 768": Work(1, 256, 768),
    "8 x 1 after 1,023": Work(8, 1, 1023),
}


def layout_of(work: Work) -> StepLayout:
    """The step's layout; blocks in an order that is not that of memory."""
    length = work.before + work.tokens
    blocks = -(-length // BLOCK_TOKENS)
    order = torch.randperm(work.sequences * blocks).int().view(work.sequences, blocks)
    positions = torch.arange(work.before, length)
    slots = order[:, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    return StepLayout(
        slots=slots.flatten().long(),
        positions=positions.int().repeat(work.sequences),
        query_starts=tuple(range(0, work.sequences * work.tokens + 1, work.tokens)),
        context_lengths=(length,) * work.sequences,
        block_tables=order,
        table_rows=tuple(range(work.sequences)),
    )


def calls(heads: Heads, work: Work, dtype: torch.dtype, libraries: dict[str, ctypes.CDLL]) -> dict[str, Callable[[], object]]:
    """One layer's attention by who computes it."""
    torch.manual_seed(0)
    layout, size = layout_of(work), heads.size
    tokens, length = work.sequences * work.tokens, work.before + work.tokens
    [cache] = allocate(
        layers=1,
        num_blocks=layout.block_tables.numel(),
        kv_heads=heads.keys,
        head_dim=size,
        block_tokens=BLOCK_TOKENS,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    cache.keys.normal_()
    cache.values.normal_()
    query, key, value = (torch.randn(tokens, count, size).to(dtype) for count in (heads.queries, heads.keys, heads.keys))
    found: dict[str, Callable[[], object]] = {}
    for name, library in libraries.items():
        backend = CpuKernelBackend(library)
        found[name] = partial(backend.attend, query, key, value, cache, layout, scale=size**-0.5, window=0)
    batch = query.view(work.sequences, work.tokens, heads.queries, size).transpose(1, 2)
    keys, values = (torch.randn(work.sequences, heads.keys, length, size).to(dtype) for _ in range(2))
    row, column = torch.arange(work.before, length)[:, None], torch.arange(length)[None]
    found["torch"] = partial(
        torch.nn.functional.scaled_dot_product_attention, batch, keys, values, column <= row if work.before else None,
        is_causal=not work.before, scale=size**-0.5, enable_gqa=heads.keys != heads.queries,
    )  # fmt: skip
    return found


def measure(dtype: torch.dtype, libraries: dict[str, ctypes.CDLL], repeats: int, only: str) -> dict[str, dict[str, float]]:
    """Milliseconds by shape and work and by who computes, and what torch takes for each of the kernel's; medians."""
    cells: dict[str, dict[str, float]] = {}
    for cell, heads, work in ((f"{shape}: {name}", SHAPES[shape], WORKS[name]) for shape in SHAPES for name in WORKS):
        if only not in cell:
            continue
        systems = calls(heads, work, dtype, libraries)
        seconds: dict[str, list[float]] = {who: [] for who in systems}
        for number in range(repeats + 1):
            for who, call in kernels.in_turns(systems, number):
                began = time.perf_counter()
                call()
                seconds[who].append(time.perf_counter() - began)
        medians = {who: 1e3 * statistics.median(each[1:]) for who, each in seconds.items()}
        ratios = {f"{who} / kernel": round(each / medians["kernel"], 3) for who, each in medians.items() if who != "kernel"}
        cells[cell] = {who: round(each, 3) for who, each in medians.items()} | ratios
        pairs = work.sequences * (work.tokens * work.before + work.tokens * (work.tokens + 1) // 2)
        rate = 4e-6 * pairs * heads.queries * heads.size / medians["kernel"]
        cells[cell]["kernel's GFLOP/s"] = round(rate, 1)
        print(f"{dtype} {cell}: {cells[cell]}", flush=True)
    return cells


def main() -> int:
    """Run, print and record."""
    parser = kernels.parser(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="the cells whose names have this in them")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with kernels.kernels_of(options.level) as library:
        libraries = kernels.taking_turns(library, options.beside)
        record = kernels.record_of(
            "milliseconds of one layer's attention in a prompt's step; medians, and the others' time for the kernel's",
            library,
            lambda dtype: measure(dtype, libraries, options.repeats, options.only),
            threads=options.threads,
        )
    if not options.no_record:
        kernels.keep(record, "attention")
    return 0


if __name__ == "__main__":
    sys.exit(main())
