"""Packed linear layers against the definition, in double precision."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest
import torch
import transformers.activations

from serve.model import linear
from serve.model.kernels.ahead import LEVELS as ALL_LEVELS
from serve.model.kernels.ahead import processor_words
from serve.model.quantized import BITS, quantizing_packer
from tests.support.kernels import LEVELS, cpu_kernels, kernels_of

CPU = torch.device("cpu")
_V4: Final = "x86-64-v4"
BF16_LEVELS: Final = (*LEVELS, _V4) if {level.name: level.needs for level in ALL_LEVELS}[_V4] <= processor_words() else LEVELS
"""With AVX-512 also what serves where its products of bf16 numbers are missing."""


@pytest.fixture(params=[*LEVELS, "without kernels"])
def packer(request: pytest.FixtureRequest) -> linear.Packer | None:
    kernels = None if request.param == "without kernels" else kernels_of(request.param)
    return linear.choose_packer(CPU, torch.float32, kernels)[1]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 64, 131, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 3), (31, 64), (32, 65), (100, 257), (509, 768), (48, 3073)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_packed_product_is_the_product(
    packer: linear.Packer | None, rows: int, outputs: int, inputs: int, with_bias: bool
) -> None:
    assert packer is not None
    torch.manual_seed(rows * outputs)
    weight, x = torch.randn(outputs, inputs), torch.randn(1, rows, inputs)
    bias = torch.randn(outputs) if with_bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    out = packer(weight, bias)(x)
    assert out.shape == (1, rows, outputs)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6 * inputs**0.5 * 4)


@pytest.mark.parametrize("level", BF16_LEVELS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 13, 20, 21, 33, 96, 131])
@pytest.mark.parametrize(("outputs", "inputs"), [(33, 64), (100, 255), (96, 1024)])
def test_bf16_rounds_once(rows: int, outputs: int, inputs: int, level: str) -> None:
    _, packer = linear.choose_packer(CPU, torch.bfloat16, kernels_of(level))
    if packer is None:
        pytest.skip("this processor has no packed bf16 route")
    torch.manual_seed(outputs)
    weight, x, bias = (torch.randn(*shape).bfloat16() for shape in ((outputs, inputs), (rows, inputs), (outputs,)))
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(packer(weight, bias)(x).double(), expected, rtol=2**-7, atol=0.02)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [1, 32, 65, 800])
def test_any_number_of_threads_computes_all_outputs_with_the_same_bits_beside_others(
    level: str, dtype: torch.dtype, outputs: int
) -> None:
    kernels, inputs, is_bf16 = kernels_of(level), 96, int(dtype == torch.bfloat16)
    _, packer = linear.choose_packer(CPU, dtype, kernels)
    if is_bf16 and not isinstance(packer, linear.KernelPacker):
        pytest.skip("this processor has no packed bf16 route")
    assert isinstance(packer, linear.KernelPacker)
    torch.manual_seed(outputs)
    weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(300, inputs).to(dtype)
    panels = packer.begin((outputs, inputs), dtype)
    assert panels is not None
    panels.put(0, weight)

    def product(rows: int, threads: int) -> torch.Tensor:
        out = torch.full((rows, outputs), math.nan, dtype=dtype)
        places = x.data_ptr(), rows, inputs, panels.packed.data_ptr(), None, None, 0, out.data_ptr()
        kernels.tessera_linear(is_bf16, panels.bits, threads, *places, outputs, inputs)
        return out

    def products(threads: int) -> list[torch.Tensor]:
        return [product(rows, threads) for _ in range(20) for rows in (1, 5, 40, 300)]

    expected = products(1)
    torch.testing.assert_close(
        expected[3].double(), x.double() @ weight.double().T, rtol=2**-7 if is_bf16 else 1e-5, atol=1e-4 + 0.02 * is_bf16
    )
    with ThreadPoolExecutor(4) as pool:  # each with threads of its own
        for found in pool.map(products, range(2, 8)):
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (32, 96), (65, 70), (800, 258)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_weight_that_is_not_packed_yet_gives_the_same_bits(
    level: str, dtype: torch.dtype, outputs: int, inputs: int, is_transposed: bool
) -> None:
    _, packer = linear.choose_packer(CPU, dtype, kernels_of(level))
    if dtype == torch.bfloat16 and not isinstance(packer, linear.KernelPacker):
        pytest.skip("this processor has no packed bf16 route")
    assert isinstance(packer, linear.KernelPacker)
    torch.manual_seed(outputs)
    file = torch.randn(outputs + 3, inputs + 5).to(dtype)  # a rank's part: rows and columns of a whole
    file = file.t().contiguous().t() if is_transposed else file
    weight, bias = file[2 : 2 + outputs, 3 : 3 + inputs], torch.randn(outputs).to(dtype)
    packed, later = packer.begin((outputs, inputs), dtype), packer.begin((outputs, inputs), dtype, later=True)
    assert packed is not None
    assert later is not None
    packed.put(0, weight.clone(memory_format=torch.contiguous_format))
    later.read_from(weight)
    later.packed.fill_(math.nan)
    assert later.rows is weight
    expected, found = packer.product(packed, bias, "silu"), packer.product(later, bias, "silu")

    rows = [torch.randn(count, inputs).to(dtype) for count in (*range(1, 34), 48, 127, 128, 129, 300)]
    before = [found(x) for x in rows]
    later.put(0, weight, threads=1)
    assert torch.equal(later.packed, packed.packed)
    file.fill_(math.nan)
    assert all(found(x).isnan().all() for x in rows[:2]), "it reads the plain rows until it is told"
    later.settle()
    assert later.rows is None
    for x, one in zip(rows, before, strict=True):
        assert torch.equal(one, expected(x))
        assert torch.equal(found(x), one)


def test_rows_that_lie_any_way_are_packed() -> None:
    _, packer = linear.choose_packer(CPU, torch.float32, cpu_kernels())
    assert isinstance(packer, linear.KernelPacker)
    numbers = torch.randn(70, 90)
    for rows in (
        numbers[::5, ::7],
        numbers[:1, ::3],
        numbers[::3, :1],
        numbers[:1, :1],
        numbers[::69, ::89][:1, :1],
        numbers.t(),
    ):
        found, expected = (packer.begin((len(rows), rows.shape[1]), torch.float32) for _ in range(2))
        assert found is not None
        assert expected is not None
        found.put(0, rows)
        expected.put(0, torch.empty(rows.shape).copy_(rows))
        assert torch.equal(found.packed, expected.packed)


@pytest.mark.parametrize("level", BF16_LEVELS)
def test_bf16_outputs_are_the_nearest_numbers_and_in_the_middle_the_even_ones(level: str) -> None:
    name, packer = linear.choose_packer(CPU, torch.bfloat16, kernels_of(level))
    assert name == "kernel"
    assert packer is not None
    eighth = 2.0**-8
    pairs = [(1.0, eighth), (1 + 2 * eighth, eighth), (-1.0, -eighth), (1.0, eighth * 1.25), (3.0, -3.0), (3.3e38, 1e38)]
    pairs += [(math.inf, 1.0), (-math.inf, 1.0), (math.nan, 1.0), (math.inf, -math.inf)]
    x = torch.tensor(pairs).bfloat16()
    out = packer(torch.ones(33, 2).bfloat16(), None)(x)
    torch.testing.assert_close(out, x.float().sum(1).bfloat16()[:, None].expand(-1, 33), rtol=0, atol=0, equal_nan=True)


DEFINITIONS = {
    "none": lambda x: x,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "relu": torch.relu,
}


@pytest.mark.parametrize("activation", linear.ACTIVATIONS)
@pytest.mark.parametrize("rows", [1, 9])
def test_an_activation_follows_the_product(packer: linear.Packer | None, activation: str, rows: int) -> None:
    """Over the whole range of inputs, both tails included: each output is one input, so that nothing else is measured."""
    x = torch.cat(
        [torch.linspace(-30, 30, 1501), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 3e4, -3e4, 1e20, -1e20])]
    )
    for product in (packer, linear.plain):
        assert product is not None
        out = product(x[:, None].contiguous(), None, activation)(torch.ones(rows, 1))
        expected = DEFINITIONS[activation](x.double()).expand(rows, -1)
        torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("activation", linear.ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bias_is_added_first(activation: str, dtype: torch.dtype, level: str) -> None:
    _, packer = linear.choose_packer(CPU, dtype, kernels_of(level))
    if packer is None:
        pytest.skip("this processor has no packed bf16 route")
    torch.manual_seed(1)
    weight, x, bias = (torch.randn(*shape).to(dtype) for shape in ((40, 24), (5, 24), (40,)))
    expected = DEFINITIONS[activation](torch.nn.functional.linear(x.double(), weight.double(), bias.double()))
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    for product in (packer, linear.plain):
        out = product(weight, bias, activation)(x).double()
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance * 3)


@pytest.mark.parametrize("level", BF16_LEVELS)
@pytest.mark.parametrize("activation", linear.ACTIVATIONS)
def test_an_activation_in_bf16_is_the_nearest_number_or_nearly(activation: str, level: str) -> None:
    """A tenth of the last bit more than half of it, where it matters: below a millionth what is wrong is below 1e-7."""
    _, packer = linear.choose_packer(CPU, torch.bfloat16, kernels_of(level))
    if packer is None:
        pytest.skip("this processor has no packed bf16 route")
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    between = torch.linspace(-9, 9, 200_001)  # sums have more bits than their summands
    upper = torch.cat((numbers, between.bfloat16()))
    lower = torch.cat((torch.zeros_like(numbers), (between - between.bfloat16().float()).bfloat16()))
    sums = upper.double() + lower.double()
    weight = torch.ones(33, 2).bfloat16()
    found, exact = packer(weight, None, activation)(torch.stack((upper, lower), 1)).double(), DEFINITIONS[activation](sums)
    assert torch.equal(found[:, :1].expand_as(found).nan_to_num(), found.nan_to_num()), "all outputs are alike"
    is_usual = sums.abs() < 1e30
    wanted = exact[is_usual]
    off, is_large = (found[is_usual, 0] - wanted).abs(), wanted.abs() > 1e-6
    ulp = torch.exp2(torch.floor(torch.log2(wanted[is_large].abs())) - 7)
    assert (off[is_large] / ulp).max() <= 0.6
    assert off[wanted.abs() <= 1e-6].max() <= 1e-7
    assert torch.isnan(found[sums.isnan()]).all()


@pytest.mark.parametrize("activation", linear.ACTIVATIONS)
def test_nan_is_not_activated_away(packer: linear.Packer | None, activation: str) -> None:
    assert packer is not None
    assert packer(torch.full((3, 4), math.nan), None, activation)(torch.ones(1, 4)).isnan().all()


@pytest.mark.parametrize("name", ["gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "swish", "relu"])
def test_the_activations_of_transformers_are_known(name: str) -> None:
    x = torch.linspace(-6, 6, 501, dtype=torch.float64)
    module = transformers.activations.ACT2FN[name]
    known = linear.activation_of(module)
    assert known != "none"
    torch.testing.assert_close(DEFINITIONS[known](x), module(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["gelu_10", "quick_gelu", "relu2", "mish", "tanh"])
def test_other_activations_are_left_to_transformers(name: str) -> None:
    assert linear.activation_of(transformers.activations.ACT2FN[name]) == "none"


@pytest.mark.skipif("avx2" not in processor_words() or "fma" not in processor_words(), reason="a processor without AVX2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_for_avx2_have_linear_layers_of_every_type(dtype: torch.dtype) -> None:
    kernels = kernels_of(LEVELS[-1])
    assert linear.choose_packer(CPU, dtype, kernels)[0] == "kernel"
    assert quantizing_packer("int4", 32, dtype, kernels)[0] == "int4-kernel"


@pytest.mark.parametrize("level", LEVELS)
def test_rows_need_not_lie_next_to_one_another(level: str) -> None:
    _, packer = linear.choose_packer(CPU, torch.float32, kernels_of(level))
    assert packer is not None
    weight, wide = torch.randn(40, 24), torch.randn(5, 48)
    product = packer(weight, None)
    torch.testing.assert_close(product(wide[:, :24]), wide[:, :24] @ weight.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(product(wide[:, ::2]), wide[:, ::2] @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("route", ["kernel", "without kernels", "odd inputs", "int8", "int4", "int8 without kernels"])
def test_a_packed_product_holds_nothing_of_the_weight_it_was_made_of(route: str, dtype: torch.dtype) -> None:
    kernels = None if "without" in route else cpu_kernels()
    quantization = route.split()[0]
    if quantization in BITS:
        packer: linear.Packer | None = quantizing_packer(quantization, 32, dtype, kernels)[1]
    else:
        packer = linear.choose_packer(CPU, dtype, kernels)[1]
    if packer is None:
        pytest.skip("this processor has no packed route for the type")
    weight, x = (torch.randn(48, 65 if "odd" in route else 64).to(dtype) for _ in range(2))
    product = packer(weight, None)
    before = product(x)
    weight.fill_(math.nan)
    assert torch.equal(product(x), before)
