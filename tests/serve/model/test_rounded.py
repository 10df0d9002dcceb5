"""Layers of whole numbers times whole numbers: the kernel against the same arithmetic in torch, bit for bit between rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from serve.model.linear import FUNCTIONS, Matmul
from serve.model.quantized import BITS, RUN, Quantized, quantize, quantizing_packer
from tests.support.kernels import cpu_kernels

ROWS = (300, 131, 31, 25, 18, 13, 9, 8, 7, 6, 5, 4, 3, 2, 1)


@pytest.fixture(autouse=True)
def products_of_bytes() -> None:
    if not cpu_kernels().tessera_linear_rounded_supported():
        pytest.skip("this processor does not multiply bytes (AVX512-VNNI)")


def packed(quantization: str, group: int, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Matmul:
    name, pack = quantizing_packer(quantization, group, torch.bfloat16, cpu_kernels())
    assert name == f"{quantization}-vnni"
    return pack(weight, bias, activation)


def rounded(x_MI: Tensor, run: int) -> Tensor:
    """The inputs as the kernel takes them, in fp64."""
    rows, inputs = x_MI.shape
    runs_MAR = torch.nn.functional.pad(x_MI.float(), (0, -inputs % run)).view(rows, -1, run)
    top_MA1 = runs_MAR.abs().amax(dim=2, keepdim=True)
    inverse_MA1 = torch.where(top_MA1 >= 1e-30, torch.full_like(top_MA1, 127.0) / top_MA1, 0.0)
    whole_MAR = (runs_MAR * inverse_MA1).round()
    return (whole_MAR.double() * (top_MA1 / 127.0).double()).view(rows, -1)[:, :inputs]


def expected(weight: Quantized, x_MI: Tensor, run: int, bias: Tensor | None, activation: str) -> Tensor:
    sums_MO = rounded(x_MI, run) @ weight.dequantized().double().T
    return FUNCTIONS[activation]((sums_MO + (0.0 if bias is None else bias.double())).float())


@pytest.mark.parametrize(("quantization", "group"), [("int8", 32), ("int4", 32), ("int4", 64), ("int4", 128)])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 4), (31, 64), (100, 260), (65, 252), (130, 1100)])
def test_the_kernel_computes_with_rounded_inputs_whatever_rows_are_beside(
    quantization: str, group: int, outputs: int, inputs: int
) -> None:
    torch.manual_seed(outputs * inputs)
    weight, bias, x = (torch.randn(shape).bfloat16() for shape in ((outputs, inputs), (outputs,), (ROWS[0], inputs)))
    x[3] *= 1e-20
    x[5] = 0.0
    x[7, 0] = 60.0
    x[8] = 1e-36
    for own_bias, activation in ((bias, "gelu"), (None, "none")):
        product = packed(quantization, group, weight, own_bias, activation)
        all_rows = product(x)
        run = RUN // 2 if (quantization, group) == ("int4", 32) else RUN
        wanted = expected(quantize(weight, BITS[quantization], group), x, run, own_bias, activation)
        torch.testing.assert_close(all_rows.float(), wanted, rtol=2**-7, atol=2**-12 * inputs**0.5)
        for rows in ROWS:
            assert torch.equal(product(x[:rows]), all_rows[:rows]), rows
            assert torch.equal(product(x[-rows:]), all_rows[-rows:]), rows


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    torch.manual_seed(0)
    product = packed("int8", 32, torch.randn(200, 320).bfloat16())
    x, before = torch.randn(70, 320).bfloat16(), torch.get_num_threads()
    wanted = product(x)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(product(x), wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("quantization", "least", "most"), [("int8", -127, 127), ("int4", -8, 7)])
def test_every_whole_number_is_itself(quantization: str, least: int, most: int) -> None:
    """Each output has one of the numbers at each of its inputs, and the largest one, so that its scale is 1."""
    numbers = torch.arange(least, most + 1)
    numbers = torch.cat([numbers, numbers[-1:].repeat(-len(numbers) % 4)])
    weight = torch.stack([numbers.roll(output) for output in range(40)]).bfloat16()
    product = packed(quantization, 128, weight)
    for rows in (weight.shape[1], 5, 1):
        for size in (1.0, -1.0):
            x = size * torch.eye(weight.shape[1], dtype=torch.bfloat16)[:rows]
            assert torch.equal(product(x), size * weight.T[:rows])


def test_an_input_far_beyond_the_others_costs_its_own_run_precision_and_no_more() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 256).bfloat16(), torch.randn(9, 256).bfloat16()
    x[:, 70] = 1000.0
    weight[:, 70] = 0.0
    product, whole = packed("int8", 32, weight), quantize(weight, 8, 32).dequantized()
    clean = (product(x).float() - x.float() @ whole.T).abs().amax()
    x_near = x.clone()
    x_near[:, RUN : 2 * RUN] = 0.0
    near = (product(x_near).float() - x_near.float() @ whole.T).abs().amax()
    assert near < 0.5 < clean, "a run of 64 is rounded to steps of 8 by it, the other three are not"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_an_input_that_is_no_number_makes_its_row_none_and_no_other(quantization: str, wrong: float) -> None:
    product = packed(quantization, 32, torch.ones(40, 68).bfloat16())
    x = torch.ones(12, 68, dtype=torch.bfloat16)
    x[2, 66], x[9, 0] = wrong, wrong
    for rows in (12, 3):
        assert product(x[:rows]).isnan().all(dim=1).tolist() == [row in (2, 9) for row in range(rows)]


def test_rows_need_not_lie_next_to_one_another() -> None:
    torch.manual_seed(0)
    product, wide = packed("int8", 32, torch.randn(40, 24).bfloat16()), torch.randn(5, 48).bfloat16()
    for x in (wide[:, :24], wide[:, ::2]):
        assert torch.equal(product(x), product(x.contiguous()))


def test_what_has_no_whole_quads_goes_the_other_way() -> None:
    torch.manual_seed(0)
    for quantization, group, inputs in (("int8", 32, 66), ("int4", 48, 96)):
        weight, x = torch.randn(8, inputs).bfloat16(), torch.randn(3, inputs).bfloat16()
        whole = quantize(weight, BITS[quantization], group).dequantized()
        torch.testing.assert_close(packed(quantization, group, weight)(x).float(), x.float() @ whole.T, rtol=2**-7, atol=1e-3)
