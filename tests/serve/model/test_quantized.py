"""Layers of whole numbers: the kernel against plain torch, plain torch against the definition."""

from __future__ import annotations

import math

import pytest
import torch

from serve.model import linear
from serve.model.quantized import quantize, quantizing_packer, reference
from tests.support.kernels import LEVELS, cpu_kernels, kernels_of


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("quantization", "group"), [("int8", 32), ("int4", 32), ("int4", 128), ("int4", 600)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (31, 64), (100, 258), (65, 255), (130, 1100)])
def test_the_kernel_computes_what_the_reference_does(
    quantization: str, group: int, dtype: torch.dtype, outputs: int, inputs: int, level: str
) -> None:
    """At every number of rows that has a loop of its own, and at those that widen the weights first."""
    torch.manual_seed(outputs * inputs)
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    _, pack = quantizing_packer(quantization, group, dtype, kernels_of(level), rounds_inputs=False)
    bits = 8 if quantization == "int8" else 4
    for own_bias, activation in ((bias, "gelu"), (None, "none")):
        product = pack(weight, own_bias, activation)
        expected = reference(quantize(weight, bits, group), own_bias, activation)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 18, 25, 31, 131, 300):
            x = torch.randn(1, rows, inputs).to(dtype)
            tolerance = 1e-5 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(product(x), expected(x), rtol=tolerance, atol=tolerance * inputs**0.5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("quantization", "least", "most"), [("int8", -127, 127), ("int4", -8, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_whole_number_is_itself_in_the_products_type(
    quantization: str, least: int, most: int, dtype: torch.dtype, level: str
) -> None:
    """Each output has one of the numbers at each of its inputs, and the largest one, so that its scale is 1."""
    numbers = torch.arange(least, most + 1)
    if len(numbers) % 2:
        numbers = torch.cat([numbers, numbers[-1:]])
    weight = torch.stack([numbers.roll(output) for output in range(40)]).to(dtype)
    _, pack = quantizing_packer(quantization, weight.shape[1], dtype, kernels_of(level), rounds_inputs=False)
    product = pack(weight, None)
    for rows in (weight.shape[1], 5):
        x = torch.eye(weight.shape[1], dtype=dtype)[:rows]
        assert torch.equal(product(x), weight.T[:rows])


@pytest.mark.parametrize(("bits", "steps"), [(8, 127), (4, 8)])
def test_each_weight_is_rounded_to_the_nearest_of_its_groups_numbers(bits: int, steps: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 80)
    weight[2] = 0.0
    rounded = quantize(weight, bits, 32)
    assert rounded.scales_OG.shape == ((5, 1) if bits == 8 else (5, 3))
    error = (rounded.dequantized() - weight).abs()
    for begin in range(0, 80, 80 if bits == 8 else 32):
        part = slice(begin, begin + (80 if bits == 8 else 32))
        largest = weight[:, part].abs().amax(dim=1, keepdim=True)
        # Of 4 bits there is no +8: what lies opposite to the farthest value may be a whole step off.
        assert (error[:, part] <= largest / steps * (0.501 if bits == 8 else 1.001)).all()
    assert (rounded.dequantized()[2] == 0).all()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_weight_that_is_no_number_stays_seen(quantization: str, wrong: float) -> None:
    weight = torch.ones(40, 64)
    weight[3, 5] = wrong
    for kernels in (*map(kernels_of, LEVELS), None):
        out = quantizing_packer(quantization, 32, torch.float32, kernels)[1](weight, None)(torch.ones(2, 64))
        assert out[:, 3].isnan().all()
        assert out[:, [0, 39]].isfinite().all()


def test_the_name_says_what_computes() -> None:
    assert quantizing_packer("int4", 32, torch.float32, None)[0] == "int4-torch"
    name, _ = quantizing_packer("int8", 32, torch.float32, cpu_kernels())
    assert name == ("int8-kernel" if cpu_kernels().tessera_linear_supported(0) else "int8-torch")


@pytest.mark.parametrize("level", LEVELS)
def test_rows_need_not_lie_next_to_one_another(level: str) -> None:
    weight, wide = torch.randn(40, 24), torch.randn(5, 48)
    _, pack = quantizing_packer("int8", 32, torch.float32, kernels_of(level))
    product, plain = pack(weight, None), linear.plain(quantize(weight, 8, 32).dequantized(), None)
    for x in (wide[:, :24], wide[:, ::2]):
        torch.testing.assert_close(product(x), plain(x), rtol=1e-5, atol=1e-5)
