"""The Triton kernels compiled for GPUs that are not there.

``python -m tests.serve.model.cuda.compiled`` compiles all variants for all architectures, two at a time, in a quarter of an
hour, and keeps what a program of each takes in ``resources.json``: registers, bytes of stack (spilled registers) and of shared
memory, columns of tensor memory (which 10.0 has), how many of its instructions have a thread load fewer than four bytes, and
how many multiply for a warp group. With the words ``NAME ...`` it prints those variants alone, as a JSON object by
architecture. A process of its own, since Triton decides when the kernels are imported whether they are compiled.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from serve.model.cuda import kernels, linear_kernels, norm_kernels
from serve.model.cuda.layers import warps_for
from serve.model.cuda.linear import linear_shape
from serve.model.cuda.tiling import (
    COMBINE_WARPS,
    MOST_SPLITS,
    SHARE_POSITIONS,
    WRITE_WARPS,
    padded_head,
    power_of_two,
    precision_of,
    shape_of,
)
from tests.serve.model.cuda.resources import SHARED_BYTES, keep
from tests.serve.model.cuda.variants import FP8_FROM, HEAD_SIZES, NAMES, Variant, attention_variants

FP8: Final = "*fp8e4nv"
ALIGNED: Final = {
    *("query_token", "query_head", "key_token", "key_head", "value_token", "value_head", "angle_token"),
    *("inputs", "outputs", "x_row", "y_row", "z_row", "weight_row"),
}
"""Numbers that are multiples of 16 in what is compiled, as they are where a model's sizes are."""
Variants = Mapping[str, Callable[[], dict[str, int]]]
"""What compiles each, by its name."""
AT_ONCE: Final = 2
"""Processes that compile."""
_DUMP: Final = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_ANGLES: Final = {
    "halves": {"PAIRS": False, "TOLD_ONCE": False},
    "told once": {"PAIRS": False, "TOLD_ONCE": True},
    "pairs": {"PAIRS": True, "TOLD_ONCE": True},
    "none": {"PAIRS": False, "TOLD_ONCE": False},
}


def attend(architecture: int, of: Variant) -> dict[str, int]:
    """What one variant of ``attend`` takes."""
    facts = {"capped": of.capped, "biased": of.biased, "fp8": of.fp8}
    shape = shape_of(of.dtype, of.head_dim, of.group, long=of.phase == "prefill", **facts)
    number = f"*{NAMES[of.dtype]}"
    kept, angles = FP8 if of.fp8 else number, "*fp32" if of.angles == "pairs" else number
    constants: dict[str, Any] = {
        "H": 4 * of.group, "G": 4, "D": of.head_dim, "D2": padded_head(of.head_dim), "S": 16, "R": shape.heads, "M": shape.rows,
        "N": shape.positions, "WINDOW": 256 if of.window else 0, "SPLITS": 8 if of.phase == "decode" else 1,
        "SHARE": SHARE_POSITIONS, "CAPPED": of.capped, "BIASED": of.biased, "SINKS": of.sinks,
        "TURNED": 0 if of.angles == "none" else of.head_dim, **_ANGLES[of.angles],
        "WIDEN": False, "PRECISION": precision_of(of.dtype),
    }  # fmt: skip
    types = {
        "query": number, "keys": kept, "values": kept, "out": number, "partial": "*fp32", "stats": "*fp32",
        "tiles": "*i32", "positions": "*i32", "tables": "*i32", "cosines": angles, "sines": angles, "bias": "*fp32",
        "sinks": "*fp32", "scale": "fp32", "softcap": "fp32", "query_token": "i32", "query_head": "i32", "angle_token": "i32",
        "table_width": "i32", "bias_width": "i32",
    }  # fmt: skip
    options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages, "maxnreg": shape.most_registers}
    return _resources(kernels.attend, types, constants, architecture, options)


def quantized_linear(architecture: int, dtype: torch.dtype, bits: int, rows: int) -> dict[str, int]:
    """What a layer of whole numbers takes, at so many rows."""
    shape = linear_shape(dtype, bits, rows)
    number = f"*{NAMES[dtype]}"
    types = dict.fromkeys(("x", "bias", "out"), number) | {"weight": "*i8" if bits == 8 else "*u8", "scales": "*fp32"}
    types |= dict.fromkeys(("rows", "inputs", "outputs", "x_row", "weight_row", "groups"), "i32")
    constants = {
        "BITS": bits, "GROUP": 32, "BM": shape.rows, "BO": shape.outputs, "K": shape.inputs, "BIASED": True, "KIND": "gelu",
        "SPANS": shape.spans,
        "PRECISION": precision_of(dtype), "WIDEN": False,
    }  # fmt: skip
    return _resources(
        linear_kernels.quantized_linear,
        types,
        constants,
        architecture,
        {"num_warps": shape.num_warps, "num_stages": shape.num_stages},
    )


def write_kv(architecture: int, dtype: torch.dtype, head_dim: int, *, fp8: bool = False, pairs: bool = False) -> dict[str, int]:
    """What writing keys and values takes; ``pairs``: turned by angles in fp32 that are told once."""
    number = f"*{NAMES[dtype]}"
    strides = dict.fromkeys(("key_token", "key_head", "value_token", "value_head", "angle_token"), "i32")
    types = dict.fromkeys(("key", "value"), number) | dict.fromkeys(("keys", "values"), FP8 if fp8 else number)
    types |= {"slots": "*i64"} | dict.fromkeys(("cosines", "sines"), "*fp32" if pairs else number) | strides
    constants = {"G": 4, "D": head_dim, "D2": padded_head(head_dim), "S": 16, "TURNED": head_dim}
    constants |= {"PAIRS": pairs, "TOLD_ONCE": pairs}
    return _resources(kernels.write_kv, types, constants, architecture, {"num_warps": WRITE_WARPS})


def combine(architecture: int, dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    """What weighing the splits takes."""
    types = {"partial": "*fp32", "stats": "*fp32", "out": f"*{NAMES[dtype]}", "tiles": "*i32", "sinks": "*fp32"}
    types |= {"tokens": "i32"}
    constants = {"H": 8, "D": head_dim, "D2": padded_head(head_dim), "SPLITS": MOST_SPLITS, "SINKS": True}
    return _resources(kernels.combine, types, constants, architecture, {"num_warps": COMBINE_WARPS})


def rms_norm(architecture: int, dtype: torch.dtype, width: int, rounding: str) -> dict[str, int]:
    """What a norm takes."""
    types = dict.fromkeys(("x", "weight", "out"), f"*{NAMES[dtype]}") | {"x_row": "i32", "epsilon": "fp32"}
    padded = power_of_two(width)
    constants = {"W": width, "W2": padded, "ROUNDING": rounding}
    return _resources(norm_kernels.rms_norm, types, constants, architecture, {"num_warps": warps_for(padded)})


def sum_and_norm(architecture: int, dtype: torch.dtype, width: int, rounding: str) -> dict[str, int]:
    """What a sum of three and two norms of it take."""
    names = ("x", "y", "z", "out", "weight", "bias", "normed", "other_weight", "other_bias", "other_normed")
    types = dict.fromkeys(names, f"*{NAMES[dtype]}") | dict.fromkeys(("x_row", "y_row", "z_row"), "i32") | {"epsilon": "fp32"}
    padded = power_of_two(width)
    constants = {"W": width, "W2": padded, "THREE": True, "NORMS": 2, "ROUNDING": rounding}
    return _resources(norm_kernels.sum_and_norm, types, constants, architecture, {"num_warps": warps_for(padded)})


def _resources(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], architecture: int, options: dict[str, int | None]
) -> dict[str, int]:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    # As launched: addresses are multiples of 16, and so are strides and widths but those that a kernel does not ask for.
    aligned = [place for place, name in enumerate(kernel.arg_names) if signature[name][0] == "*" or name in ALIGNED]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs=constants, attrs={(place,): [["tt.divisibility", 16]] for place in aligned}
    )
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run([_DUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{word}:(\d+)", told)[-1]) for word in ("REG", "STACK"))
    narrow = len(re.findall(r"ld\.global[.\w]*\.[a-z](?:8|16)\b", made.asm["ptx"]))
    grouped = len(re.findall(r"\bwgmma\.mma_async|\btcgen05\.mma", made.asm["ptx"]))
    return {
        "registers": registers,
        "stack": stack,
        "shared": made.metadata.shared,
        "tensor_memory": getattr(made.metadata, "tmem_size", None) or 0,
        "narrow_loads": narrow,
        "group_products": grouped,
    }


def of_attention(architecture: int) -> Variants:
    """Of attention, and of what writes keys and values and weighs splits."""
    found: dict[str, Callable[[], dict[str, int]]] = {
        name: functools.partial(attend, architecture, of) for name, of in attention_variants(architecture).items()
    }
    for head_dim in (min(HEAD_SIZES), max(HEAD_SIZES)):
        write = functools.partial(write_kv, architecture, torch.bfloat16, head_dim)
        found[f"write_kv, head size {head_dim}"] = write
        found[f"write_kv, head size {head_dim}, other angles"] = functools.partial(write, pairs=True)
        found[f"combine, head size {head_dim}"] = functools.partial(combine, architecture, torch.bfloat16, head_dim)
        if architecture >= FP8_FROM:
            found[f"write_kv, head size {head_dim}, fp8"] = functools.partial(write, fp8=True)
    return found


def of_linear(architecture: int) -> Variants:
    """Of layers of whole numbers."""
    return {
        f"int{bits}, {NAMES[dtype]}, {rows} rows": functools.partial(quantized_linear, architecture, dtype, bits, rows)
        for bits, dtype, rows in itertools.product((8, 4), NAMES, (1, 64))
        if rows == 1 or dtype != torch.float32
    }


def of_norms(architecture: int) -> Variants:
    """Of norms over a head, and over all features of models from small to large."""
    return {
        f"rms_norm, {NAMES[dtype]}, {width} features": functools.partial(rms_norm, architecture, dtype, width, rounding)
        for dtype in (torch.float32, torch.bfloat16)
        for width, rounding in ((128, "before weight"), (4096, "once"), (12288, "one plus weight"))
    } | {
        f"sum_and_norm, {NAMES[dtype]}, {width} features": functools.partial(sum_and_norm, architecture, dtype, width, rounding)
        for dtype in (torch.float32, torch.bfloat16)
        for width, rounding in ((768, "layer"), (6144, "layer"), (12288, "before weight"))
    }


_KINDS: Final = {"attention": of_attention, "linear": of_linear, "norms": of_norms}


def measured(job: tuple[str, int, str]) -> dict[str, int]:
    """What one takes: of a kind, for an architecture, by its name."""
    kind, architecture, name = job
    return _KINDS[kind](architecture)[name]()


def main(names: list[str]) -> None:
    """Compile what is named and print it, or all, and keep it."""
    jobs = [
        (kind, architecture, name)
        for kind, of_kind in _KINDS.items()
        for architecture in SHARED_BYTES
        for name in of_kind(architecture)
        if not names or name in names
    ]
    found: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
    with tempfile.TemporaryDirectory() as cache:  # whatever an earlier run has left
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(AT_ONCE) as processes:
            for (kind, architecture, name), taken in zip(jobs, processes.map(measured, jobs), strict=True):
                found.setdefault(kind, {}).setdefault(str(architecture), {})[name] = taken
    if names:
        print(json.dumps(found))
    else:
        keep(found)


if __name__ == "__main__":
    main(sys.argv[1:])
