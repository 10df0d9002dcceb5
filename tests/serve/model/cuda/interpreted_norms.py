"""The Triton kernels of norms, and of sums and norms, under Triton's interpreter beside transformers' modules, on the CPU.

``TRITON_INTERPRET=1 python -m tests.serve.model.cuda.interpreted_norms`` prints a JSON object: by case, the largest difference
as a share of what the type's own rounding allows. A process of its own, see ``interpreted``.
"""

from __future__ import annotations

import copy
import json
from typing import Final

import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from serve.model.cuda import residuals
from serve.model.cuda.layers import norm_by_one_launch
from tests.serve.model.cuda.interpreter import patch_once

ROUNDING: Final = {torch.float32: 1e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""Of numbers below 2: two units in the last place of either half precision."""
KINDS: Final = (LlamaRMSNorm, Olmo2RMSNorm, Gemma2RMSNorm)
CASES: Final = {
    f"{kind.__name__} of {width}, {str(dtype)[6:]}": (kind, width, dtype)
    for kind in KINDS
    for width in (7, 64, 1100)
    for dtype in ROUNDING
}


def compare(name: str, device: str = "cpu") -> float:
    """One case by the kernel and by the module: rows that lie apart from one another, heads, and rows of other strides."""
    kind, width, dtype = CASES[name]
    torch.manual_seed(width)
    module = kind(width).to(device, dtype)
    nn.init.normal_(module.weight, 0.5, 0.5)
    twin = copy.deepcopy(module)
    norm_by_one_launch(twin)
    assert "forward" in twin.__dict__
    worst = 0.0
    wide = (torch.randn(1, 5, 3, 2 * width) * 2 + 1).to(device, dtype)
    for x in (wide[:, :, 0, :width], wide[..., :width].contiguous(), wide[..., :width], wide[:, 1:2, 1, width:]):
        found, expected = twin(x), module(x)
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        worst = max(worst, float(((found - expected).abs() / expected.abs().clamp(min=1.0)).max()))
    return worst / ROUNDING[dtype]


SUMS: Final = {
    f"{parts} parts, {norms} {kind.__name__} of {width}, {str(dtype)[6:]}": (kind, parts, norms, width, dtype)
    for kind, parts, norms in (
        (nn.LayerNorm, 3, 2),
        (nn.LayerNorm, 3, 1),
        (nn.LayerNorm, 2, 1),
        (LlamaRMSNorm, 2, 1),
        (LlamaRMSNorm, 3, 2),
        (GptOssRMSNorm, 2, 1),
    )
    for width in (7, 1100)
    for dtype in ROUNDING
}


def compare_sum(name: str, device: str = "cpu") -> float:
    """One sum and its norms by the kernel, and by torch and the modules: of rows that lie apart, and one row for all."""
    kind, count, num_norms, width, dtype = SUMS[name]
    torch.manual_seed(width)
    modules = [kind(width).to(device, dtype) for _ in range(num_norms)]
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        nn.init.normal_(parameter, 0.5, 0.5)
    norms = [residuals._Norm(copy.deepcopy(module)) for module in modules]
    parts = [
        (torch.randn(1, 3, 2 * width) + 1).to(device, dtype)[..., :width],
        torch.zeros(width, device=device, dtype=dtype).expand(1, 3, width),
        torch.randn(1, 3, width).to(device, dtype),
    ][-count:]
    total = sum(parts[1:], start=parts[0])
    found = residuals._sum(parts, norms)
    worst = float(((found - total).abs() / total.abs().clamp(min=1.0)).max())
    for norm, module in zip(norms, modules, strict=True):
        expected = module(found)
        assert norm._found is not None
        assert norm._found.dtype == dtype
        for told in (norm(found), norm(found)):  # as it was computed with the sum, and by itself
            worst = max(worst, float(((told - expected).abs() / expected.abs().clamp(min=1.0)).max()))
        assert norm._found is None
    return worst / ROUNDING[dtype]


def kept_for_another() -> bool:
    """Whether a norm that is asked for something else than its sum computes that, and forgets what it had."""
    norm, twin = residuals._Norm(nn.LayerNorm(8)), nn.LayerNorm(8)
    total = residuals._sum((torch.randn(2, 8), torch.randn(2, 8)), (norm,))
    other = total.clone() + 1
    return torch.equal(norm(other), twin(other)) and norm._of is None and norm._found is None


def beside() -> bool:
    """Whether numbers of another type than the weight's are left to the module."""
    module = LlamaRMSNorm(16)
    twin = copy.deepcopy(module)
    norm_by_one_launch(twin)
    x = torch.randn(2, 16).bfloat16()
    return torch.equal(twin(x), module(x))


if __name__ == "__main__":
    patch_once()
    found = {name: compare(name) for name in CASES} | {name: compare_sum(name) for name in SUMS}
    print(json.dumps(found | {"another type": beside(), "kept for another": kept_for_another()}))
