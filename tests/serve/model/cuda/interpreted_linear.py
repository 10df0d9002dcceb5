"""The Triton kernel of whole-number weights under Triton's interpreter beside plain torch, on the CPU.

``TRITON_INTERPRET=1 python -m tests.serve.model.cuda.interpreted_linear`` prints a JSON object: by case, the largest difference
as a share of what the type's own rounding allows. A process of its own, since Triton decides when the kernel is imported
whether it is interpreted.
"""

from __future__ import annotations

import json
import math
from typing import Final

import torch

from serve.model.cuda.linear import whole_number_packer
from serve.model.quantized import BITS, quantize, reference
from tests.serve.model.cuda.interpreter import patch_once

ROUNDING: Final = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-7}
CASES: Final = {
    f"{quantization} in groups of {group}, {str(dtype)[6:]}, {outputs} x {inputs}, {rows} rows, {activation}": (
        quantization, group, dtype, outputs, inputs, rows, activation,
    )
    for quantization, group, dtype, outputs, inputs, rows, activation in [
        ("int8", 32, torch.float32, 40, 128, 3, "none"),
        ("int8", 32, torch.float32, 31, 130, 17, "gelu"),
        ("int8", 32, torch.bfloat16, 65, 300, 5, "gelu_tanh"),
        ("int8", 32, torch.float16, 70, 64, 70, "silu"),
        ("int4", 32, torch.float32, 33, 64, 2, "none"),
        ("int4", 32, torch.float32, 20, 70, 3, "relu"),
        ("int4", 64, torch.bfloat16, 66, 200, 1, "none"),
        ("int4", 128, torch.bfloat16, 10, 258, 20, "gelu"),
        ("int4", 128, torch.float16, 64, 96, 65, "silu"),
    ]
}  # fmt: skip


def compare(name: str, device: str = "cpu") -> float:
    """One case by the kernel and by plain torch, the numbers made on the CPU."""
    quantization, group, dtype, outputs, inputs, rows, activation = CASES[name]
    torch.manual_seed(rows)
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype) if rows % 2 else None
    x = torch.randn(rows, 2 * inputs).to(dtype).to(device)[:, :inputs]
    weight, bias = weight.to(device), None if bias is None else bias.to(device)
    found = whole_number_packer(quantization, group)(weight, bias, activation)(x).float()
    expected = reference(quantize(weight, BITS[quantization], group), bias, activation)(x).float()
    return float(((found - expected).abs() / (expected.abs() + inputs**0.5)).max() / ROUNDING[dtype])


def spoiled() -> list[bool]:
    """Whether the outputs of one weight that is no number, and no others, are none: of 8 and of 4 bits, in two types."""
    found = []
    for dtype in (torch.float32, torch.float16):
        weight = torch.ones(40, 64, dtype=dtype)
        weight[3, 5] = math.nan
        expected = torch.arange(40).eq(3).expand(2, 40)
        made = [whole_number_packer(name, 32)(weight, None)(torch.ones(2, 64, dtype=dtype)) for name in BITS]
        found += [torch.equal(out.isnan(), expected) for out in made]
    return found


if __name__ == "__main__":
    patch_once()
    print(json.dumps({name: compare(name) for name in CASES} | {"a weight that is no number": spoiled()}))
