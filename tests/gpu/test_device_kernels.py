"""The Triton kernels beside plain torch on a CUDA device: ``make test-gpu``. Elsewhere these tests are skipped, and say so."""

from __future__ import annotations

import pytest
import torch

from serve.model.cuda.fp8 import pack_fp8
from tests.gpu.device import DEVICE, ON_DEVICE, REHEARSED, has_fp8, processors, some
from tests.serve.model.cuda import cases, interpreted_linear, interpreted_norms
from tests.serve.model.cuda.interpreted import compare

pytestmark = ON_DEVICE


def _requires_fp8() -> None:
    if not has_fp8():
        pytest.skip("this device has no fp8: it takes compute capability 8.9")


@pytest.mark.parametrize(
    "name",
    some(cases.CASES | cases.ON_A_DEVICE, "head size 8", "fp8 cache in splits, head size 80", "pairs turned by fp32, in bf16"),
)
def test_attention_on_the_device_is_what_plain_torch_computes(name: str) -> None:
    case = (cases.CASES | cases.ON_A_DEVICE)[name]
    if case.fp8:
        _requires_fp8()
    found = compare(case, DEVICE, processors())
    assert found["difference"] <= case.device_tolerance
    assert found["caches are equal"]


@pytest.mark.parametrize("name", some(interpreted_norms.CASES, next(iter(interpreted_norms.CASES))))
def test_norms_on_the_device_are_those_of_transformers(name: str) -> None:
    with torch.no_grad():
        assert interpreted_norms.compare(name, DEVICE) <= 1.0


@pytest.mark.parametrize("name", some(interpreted_norms.SUMS, next(iter(interpreted_norms.SUMS))))
def test_sums_and_their_norms_on_the_device_are_those_of_torch_and_transformers(name: str) -> None:
    with torch.no_grad():
        assert interpreted_norms.compare_sum(name, DEVICE) <= 1.0


@pytest.mark.parametrize("name", some(interpreted_linear.CASES, next(iter(interpreted_linear.CASES))))
def test_layers_of_whole_numbers_on_the_device_are_what_plain_torch_computes(name: str) -> None:
    assert interpreted_linear.compare(name, DEVICE) <= 1.0


def test_fp8_products_on_the_device_are_near_those_of_the_plain_weight() -> None:
    _requires_fp8()
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(*shape).bfloat16().to(DEVICE) for shape in ((512, 768), (512,), (21, 768)))
    try:
        found = pack_fp8(weight, bias)(x).float()
    except RuntimeError as error:
        if REHEARSED and "only supports per-tensor scaling for CPU" in str(error):
            pytest.skip(f"torch {torch.__version__} has no fp8 products of rows with scales of their own on the CPU")
        raise
    expected = x.float() @ weight.float().t() + bias.float()
    scale = weight.float().norm(dim=1) * x.float().norm(dim=1, keepdim=True)
    assert ((found - expected).abs() / scale).max() < 2**-5
