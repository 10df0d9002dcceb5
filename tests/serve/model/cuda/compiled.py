"""The Triton kernels compiled for GPUs that are not there.

``python -m tests.serve.model.cuda.compiled ARCHITECTURE [HEAD_SIZE ...]`` prints a JSON object: by case, registers, bytes of
stack (spilled registers) and of shared memory of a program. A process of its own, since Triton decides when the kernels are
imported whether they are compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from serve.model.cuda import kernels
from serve.model.cuda.tiling import power_of_two, shape_of

NAMES: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_DUMP: Final = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def attend(architecture: int, dtype: torch.dtype, head_dim: int, group: int, *, long: bool, rules: bool) -> dict[str, int]:
    """What one variant of ``attend`` takes; ``rules``: with a window, a soft-cap, a table of biases and sinks."""
    shape = shape_of(dtype, head_dim, group, long=long, rules=rules)
    number = f"*{NAMES[dtype]}"
    constants: dict[str, Any] = {
        "H": 4 * group, "G": 4, "D": head_dim, "D2": power_of_two(head_dim), "S": 16, "M": shape.rows, "N": shape.positions,
        "WINDOW": 256 if rules else 0, "SPLITS": 1 if long else 8, "CAPPED": rules, "BIASED": rules, "SINKS": rules,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32", "WIDEN": False,
    }  # fmt: skip
    types = {
        "query": number, "keys": number, "values": number, "out": number, "partial": "*fp32", "stats": "*fp32",
        "tiles": "*i32", "positions": "*i32", "tables": "*i32", "bias": "*fp32", "sinks": "*fp32", "scale": "fp32",
        "softcap": "fp32", "query_token": "i32", "query_head": "i32", "table_width": "i32", "bias_width": "i32",
    }  # fmt: skip
    return _resources(kernels.attend, types, constants, architecture, shape.num_warps, shape.num_stages)


def write_kv(architecture: int, dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    """What writing keys and values takes."""
    number = f"*{NAMES[dtype]}"
    strides = dict.fromkeys(("key_token", "key_head", "value_token", "value_head"), "i32")
    types = dict.fromkeys(("key", "value", "keys", "values"), number) | {"slots": "*i64"} | strides
    constants = {"G": 4, "D": head_dim, "D2": power_of_two(head_dim), "S": 16}
    return _resources(kernels.write_kv, types, constants, architecture, 4, 2)


def combine(architecture: int, dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    """What weighing the splits takes."""
    types = {"partial": "*fp32", "stats": "*fp32", "out": f"*{NAMES[dtype]}", "tiles": "*i32", "sinks": "*fp32"}
    constants = {"H": 8, "D": head_dim, "D2": power_of_two(head_dim), "SPLITS": 16, "TOKENS": 8, "SINKS": True}
    return _resources(kernels.combine, types, constants, architecture, 4, 2)


def _resources(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], architecture: int, num_warps: int, num_stages: int
) -> dict[str, int]:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    # As launched: addresses are multiples of 16, and so are strides and widths but that of the table of blocks.
    names = enumerate(kernel.arg_names)
    aligned = [place for place, name in names if signature[name][0] == "*" or name.endswith(("token", "head"))]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs=constants, attrs={(place,): [["tt.divisibility", 16]] for place in aligned}
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run([_DUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{word}:(\d+)", told)[-1]) for word in ("REG", "STACK"))
    return {"registers": registers, "stack": stack, "shared": made.metadata.shared}


def table(architecture: int, head_dims: list[int]) -> dict[str, dict[str, int]]:
    """All variants of some head sizes, by name."""
    found = {}
    for head_dim in head_dims:
        for dtype in (torch.bfloat16, torch.float32):
            for long in (False, True):
                for rules in (False, True):
                    phase = ("prefill" if long else "decode") + (", rules" if rules else "")
                    sizes = attend(architecture, dtype, head_dim, 4, long=long, rules=rules)
                    found[f"{NAMES[dtype]}, head size {head_dim}, {phase}"] = sizes
        found[f"write_kv, head size {head_dim}"] = write_kv(architecture, torch.bfloat16, head_dim)
        found[f"combine, head size {head_dim}"] = combine(architecture, torch.bfloat16, head_dim)
    return found


if __name__ == "__main__":
    print(json.dumps(table(int(sys.argv[1]), [int(word) for word in sys.argv[2:]] or [64, 80, 96, 128, 256])))
