"""Norms of the kernel beside transformers' definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from serve.model.norms import KernelNorm, compute_norms
from serve.model.recording import Steps
from tests.support.kernels import LEVELS, kernels_of

KINDS: dict[str, Any] = {
    "layer norm": lambda width: nn.LayerNorm(width, eps=1e-5),
    "layer norm without bias": lambda width: nn.LayerNorm(width, eps=1e-3, bias=False),
    "rounded before the weight": LlamaRMSNorm,
    "rounded once": Olmo2RMSNorm,
    "one plus the weight": Gemma2RMSNorm,
}


@pytest.fixture(params=LEVELS)
def steps(request: pytest.FixtureRequest) -> Steps:
    return Steps(kernels_of(request.param))


@pytest.mark.parametrize("width", [1, 7, 64, 100, 768, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_is_what_it_is_in_double_precision(kind: str, width: int, steps: Steps) -> None:
    torch.manual_seed(width)
    module = KINDS[kind](width)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(1, 5, width) * 3 + 2
    expected = module.double()(x.double()) if isinstance(module, nn.LayerNorm) else module(x)
    model = nn.ModuleList([module.float()])
    compute_norms(model, steps)
    assert isinstance(module.__dict__["forward"], KernelNorm)
    with torch.no_grad():
        torch.testing.assert_close(module(x), expected.float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16_it_is_rounded_where_transformers_rounds_it(kind: str, steps: Steps) -> None:
    torch.manual_seed(3)
    module = KINDS[kind](384).bfloat16()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(1, 64, 384).bfloat16()
    with torch.no_grad():
        expected = module(x)
        compute_norms(nn.ModuleList([module]), steps)
        found = module(x)
    # Sums in another order now and then round the other way, by one place.
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)
    assert float((found != expected).float().mean()) < 0.01


def test_rows_that_lie_apart_and_heads_of_a_row_are_normed(steps: Steps) -> None:
    norm = nn.LayerNorm(8)
    compute_norms(nn.ModuleList([norm]), steps)
    with torch.no_grad():
        wide = torch.randn(1, 5, 20)
        for x in (wide[..., 3:11], wide[..., :16].view(1, 5, 2, 8), wide[..., :16].reshape(1, 5, 2, 8).transpose(1, 2)):
            expected = nn.functional.layer_norm(x, (8,), norm.weight, norm.bias)
            torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-5)


def test_weights_are_looked_up_in_each_call_and_others_are_left_alone(steps: Steps) -> None:
    norm, own, plain = nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False)
    own.forward = lambda x: x  # type: ignore[method-assign]  # as sums over ranks put one there
    compute_norms(nn.ModuleList([norm, own, plain]), steps)
    assert not isinstance(own.forward, KernelNorm)
    assert "forward" not in plain.__dict__
    with torch.no_grad():
        norm.weight = nn.Parameter(torch.zeros(8), requires_grad=False)
        norm.bias = nn.Parameter(torch.full((8,), 3.0), requires_grad=False)
        assert norm(torch.randn(2, 8)).tolist() == [[3.0] * 8] * 2
        assert norm(torch.randn(2, 8).double().to(torch.float32)).dtype is torch.float32
