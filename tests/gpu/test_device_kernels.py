"""The Triton kernels beside plain torch on a CUDA device: ``make test-gpu``. Elsewhere these tests are skipped, and say so."""

from __future__ import annotations

import pytest
import torch

from serve.model.cuda.fp8 import pack_fp8
from tests.serve.model.cuda import cases, interpreted_linear
from tests.serve.model.cuda.interpreted import compare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")]


def _requires_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this device has no fp8: it takes compute capability 8.9")


@pytest.mark.parametrize("name", cases.CASES)
def test_attention_on_the_device_is_what_plain_torch_computes(name: str) -> None:
    case = cases.CASES[name]
    if case.fp8:
        _requires_fp8()
    found = compare(case, "cuda", torch.cuda.get_device_properties(0).multi_processor_count)
    assert found["difference"] <= cases.TOLERANCE[case.dtype]
    assert found["caches are equal"]


@pytest.mark.parametrize("name", interpreted_linear.CASES)
def test_layers_of_whole_numbers_on_the_device_are_what_plain_torch_computes(name: str) -> None:
    assert interpreted_linear.compare(name, "cuda") <= 1.0


def test_fp8_products_on_the_device_are_near_those_of_the_plain_weight() -> None:
    _requires_fp8()
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(*shape).bfloat16().cuda() for shape in ((512, 768), (512,), (21, 768)))
    found, expected = pack_fp8(weight, bias)(x).float(), x.float() @ weight.float().t() + bias.float()
    scale = weight.float().norm(dim=1) * x.float().norm(dim=1, keepdim=True)
    assert ((found - expected).abs() / scale).max() < 2**-5
