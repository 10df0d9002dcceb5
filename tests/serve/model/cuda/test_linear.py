"""Smaller weights on CUDA devices, without one: the kernel interpreted, fp8 products on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from serve.model.cuda.fp8 import pack_fp8
from serve.model.cuda.linear import PADDED_TO, packed
from tests.serve.model.cuda.interpreted_linear import CASES
from tests.serve.model.cuda.processes import told_by


@pytest.mark.parametrize("name", CASES)
def test_the_interpreted_kernel_computes_what_plain_torch_does(name: str) -> None:
    assert told_by("interpreted_linear", TRITON_INTERPRET="1")[name] <= 1.0


def test_a_weight_that_is_no_number_stays_seen() -> None:
    assert told_by("interpreted_linear", TRITON_INTERPRET="1")["a weight that is no number"] == [True] * 4


def test_numbers_of_four_bits_lie_two_in_a_byte_and_rows_are_padded() -> None:
    values = torch.arange(-8, 8, dtype=torch.int8).repeat(5)[:70].repeat(3, 1)
    both = packed(values, 4)
    assert both.shape == (3, 64)
    assert PADDED_TO[4] == 64
    low, high = (both & 15).to(torch.int8) - 8, (both >> 4).to(torch.int8) - 8
    inputs = torch.stack([low.view(3, 2, 32), high.view(3, 2, 32)], dim=2).flatten(1)
    assert torch.equal(inputs[:, :70], values)
    assert packed(values, 8).shape == (3, 2 * PADDED_TO[8])


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("rows", [1, 16, 21])
def test_fp8_products_are_near_those_of_the_plain_weight(rows: int, activation: str) -> None:
    torch.manual_seed(rows)
    weight, bias, x = (torch.randn(*shape).bfloat16() for shape in ((64, 96), (64,), (2, rows, 96)))
    weight[5] *= 1000.0
    found, expected = pack_fp8(weight, bias, activation)(x), (x.float() @ weight.float().t() + bias.float())
    if activation == "gelu":
        expected = torch.nn.functional.gelu(expected)
    assert found.shape == (2, rows, 64)
    assert found.dtype == torch.bfloat16
    scale = weight.float().norm(dim=1) * x.float().norm(dim=2, keepdim=True)
    assert ((found.float() - expected).abs() / scale).max() < 2**-5
    assert ((found.float() - expected).abs() / scale).max() > 0, "rounded, and so not equal"


def test_fp8_products_are_given_weights_as_a_gpu_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns one after the other, also of a weight that is stored the other way round; the CPU takes both."""
    given = []
    multiply = torch._scaled_mm

    def noted(x: Tensor, weight: Tensor, *others: Any, **options: Any) -> Tensor:
        given.append(weight.stride())
        return multiply(x, weight, *others, **options)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    weight, x = torch.randn(32, 48).bfloat16(), torch.randn(3, 32).bfloat16()
    stored, plain = pack_fp8(weight.t(), None)(x), pack_fp8(weight.t().contiguous(), None)(x)
    torch.testing.assert_close(stored, plain, rtol=0, atol=0)
    assert given == [(1, 32), (1, 32)]


def test_an_fp8_layer_whose_sizes_are_no_multiple_of_16_keeps_its_weight() -> None:
    weight, x = torch.randn(40, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    torch.testing.assert_close(pack_fp8(weight, None)(x), x @ weight.t())


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_fp8_weight_that_is_no_number_stays_seen(wrong: float) -> None:
    weight = torch.ones(32, 32).bfloat16()
    weight[3, 5] = wrong
    out = pack_fp8(weight, None)(torch.ones(2, 32).bfloat16())
    assert out[:, 3].isnan().all()
    assert out[:, [0, 31]].isfinite().all()
