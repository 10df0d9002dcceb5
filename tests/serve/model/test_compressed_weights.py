"""bf16 weights in 12 bits: what comes back and what is computed is the same to the last bit, whatever the weights are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor

from serve.config import KernelsConfig, ModelConfig, ServerConfig
from serve.model.linear import KernelPacker, Panels, choose_packer
from serve.worker.computing import choose_linear
from tests.serve.model.test_linear import BF16_LEVELS as ALL_LEVELS
from tests.support.kernels import cpu_kernels, kernels_of

BF16_LEVELS: Final = tuple(level for level in ALL_LEVELS if level != "x86-64-v3")
CPU: Final = torch.device("cpu")
ROWS: Final = (*range(1, 18), 31, 33, 64, 131, 300, 600)

WEIGHTS: Final[dict[str, Callable[[int, int], Tensor]]] = {
    "normal": torch.randn,
    "uniform": torch.rand,
    "zeros": torch.zeros,
    "one number": lambda *shape: torch.full(shape, -0.37),
    "every other one is zero": lambda *shape: torch.randn(shape) * (torch.rand(shape) < 0.5),
    "negative zeros": lambda *shape: torch.where(torch.rand(shape) < 0.5, torch.randn(shape), torch.tensor(-0.0)),
    "subnormal": lambda *shape: torch.randn(shape) * 1e-40,
    "on the border of subnormal": lambda *shape: torch.randn(shape) * 2.0**-125,
    "as large as there are": lambda *shape: torch.randn(shape) * 1e38,
    "a few outliers": lambda *shape: torch.randn(shape) * torch.where(torch.rand(shape) < 0.001, 3e4, 1.0),
    "hardly any two alike in size": lambda *shape: torch.exp2(torch.rand(shape) * 200 - 100),
    "some rows of other sizes": lambda *shape: torch.randn(shape) * torch.exp2(torch.arange(shape[0]) % 3 * 20.0)[:, None],
    "no numbers": lambda *shape: torch.where(torch.rand(shape) < 0.01, math.nan, torch.randn(shape)),
    "infinities": lambda *shape: torch.where(torch.rand(shape) < 0.01, -math.inf, torch.randn(shape)),
}


def bits(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.int16)


def packers(level: str) -> tuple[KernelPacker, KernelPacker]:
    """Of weights as they are, and of compressed ones."""
    plain, compressed = (
        choose_packer(CPU, torch.bfloat16, kernels_of(level), compressed=compressed)[1] for compressed in (False, True)
    )
    if not isinstance(compressed, KernelPacker) or not kernels_of(level).tessera_linear_compresses():
        pytest.skip("a processor without AVX-512")
    assert isinstance(plain, KernelPacker)
    return plain, compressed


def filled(packer: KernelPacker, weight: Tensor, *, several: bool = False) -> Panels:
    panels = packer.begin((weight.shape[0], weight.shape[1]), torch.bfloat16)
    assert panels is not None
    step = Panels.ROWS if several else len(weight)
    for begin in range(0, len(weight), step):
        panels.put(begin, weight[begin : begin + step])
    return panels


@pytest.mark.parametrize("level", BF16_LEVELS)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (32, 4), (33, 6), (65, 254), (100, 256), (96, 770), (64, 1026)])
def test_every_weight_comes_back_and_products_are_the_same(level: str, kind: str, outputs: int, inputs: int) -> None:
    plain, compressed = packers(level)
    torch.manual_seed(outputs + inputs)
    weight = WEIGHTS[kind](outputs, inputs).bfloat16()
    one, other = filled(plain, weight), filled(compressed, weight, several=True)
    assert (one.bits, other.bits) == (0, 12)
    assert torch.equal(bits(other.unpacked(0, outputs)), bits(weight))
    last = (outputs - 1) // Panels.ROWS * Panels.ROWS
    assert torch.equal(bits(other.unpacked(last, outputs)), bits(weight[last:]))
    bias = torch.randn(outputs).bfloat16()
    expected, found = plain.product(one, bias, "gelu"), compressed.product(other, bias, "gelu")
    for rows in ROWS:
        x = torch.randn(rows, inputs + 2).bfloat16()[:, :inputs]
        assert torch.equal(bits(found(x)), bits(expected(x))), f"{rows} rows"


@pytest.mark.parametrize("level", BF16_LEVELS)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("kind", ["normal", "hardly any two alike in size", "some rows of other sizes"])
def test_a_weight_that_is_compressed_while_it_is_used_gives_the_same_bits(level: str, is_transposed: bool, kind: str) -> None:
    plain, compressed = packers(level)
    torch.manual_seed(0)
    file = WEIGHTS[kind](103, 261).bfloat16()
    file = file.t().contiguous().t() if is_transposed else file
    weight = file[2:100, 3:261]
    later = compressed.begin((98, 258), torch.bfloat16, later=True)
    assert later is not None
    later.read_from(weight)
    expected, found = plain.product(filled(plain, weight), None), compressed.product(later, None)
    rows = [torch.randn(count, 258).bfloat16() for count in ROWS]
    before = [found(x) for x in rows]
    later.put(0, weight, threads=1)
    file.fill_(math.nan)
    assert found(rows[0]).isnan().all(), "it reads the plain rows until it is told"
    later.settle()
    for x, one in zip(rows, before, strict=True):
        assert torch.equal(one, expected(x))
        assert torch.equal(found(x), one)


def patches(panels: Panels, panel: int = 0) -> int:
    """How many numbers of a panel have no code; -1 where there was no room for them."""
    each = panels.packed.nbytes // -(-panels.shape[0] // Panels.ROWS)
    return int(panels.packed.view(torch.uint8)[panel * each + 12 : panel * each + 16].view(torch.int32))


def test_they_take_three_quarters_of_the_memory_and_a_panel_that_does_not_fit_lies_beside_them() -> None:
    packer = packers("best")[1]
    torch.manual_seed(0)
    usual = torch.randn(1024, 768).bfloat16()
    panels = filled(packer, usual)
    assert panels.packed.nbytes <= 0.76 * usual.nbytes
    assert not panels.beside
    usual[40] *= 2.0 ** (torch.arange(768) % 200 - 100.0)
    panels = filled(packer, usual, several=True)
    assert {panel: each.nbytes for panel, each in panels.beside.items()} == {1: Panels.ROWS * 768 * 2}
    assert torch.equal(bits(panels.unpacked(0, 1024)), bits(usual))


@pytest.mark.parametrize("inputs", [2, 30, 768])
def test_a_panel_has_room_for_a_patch_in_1024_numbers_and_eight_more(inputs: int) -> None:
    plain, packer = packers("best")
    room = inputs // 32 + 8
    for count in (0, 1, room, room + 1):
        weight = torch.ones(32, inputs).bfloat16()
        weight.view(-1)[torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(0))[:count]] = 1e-20
        panels = filled(packer, weight)
        assert patches(panels) == (count if count <= room else -1)
        assert bool(panels.beside) == (count > room)
        assert torch.equal(bits(panels.unpacked(0, 32)), bits(weight))
        for rows in (1, 9, 40):
            x = torch.randn(rows, inputs).bfloat16()
            assert torch.equal(packer.product(panels, None)(x), plain(weight, None)(x))


def test_fifteen_neighbouring_exponents_and_zeros_need_no_patch() -> None:
    packer = packers("best")[1]
    for lowest in (-126, -100, 0, 110):
        weight = torch.exp2((torch.arange(64 * 96) % 16 + lowest - 1.0).double())
        weight[torch.arange(64 * 96) % 16 == 0] = 0.0
        weight = weight[torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))]
        panels = filled(packer, weight.view(64, 96).bfloat16())
        assert (patches(panels), patches(panels, 1)) == (0, 0), lowest
    sparse = torch.randn(64, 96) * (torch.rand(64, 96) < 0.1)
    assert not filled(packer, sparse.bfloat16()).beside


def test_rows_can_be_put_again_in_blocks_of_any_size() -> None:
    plain, packer = packers("best")
    torch.manual_seed(0)
    odd, usual = WEIGHTS["hardly any two alike in size"](96, 128).bfloat16(), torch.randn(96, 128).bfloat16()
    panels, weight = filled(packer, odd), odd.clone()
    for rows, begin, end in ((odd, 0, 32), (usual, 32, 64), (odd, 32, 96), (usual, 0, 96), (odd, 64, 96)):
        panels.put(begin, rows[begin:end].clone())
        weight[begin:end] = rows[begin:end]
        assert torch.equal(panels.unpacked(0, 96), weight)
        x = torch.randn(3, 128).bfloat16()
        assert torch.equal(packer.product(panels, None)(x), plain(weight, None)(x))
        if rows is usual:
            assert not panels.beside.keys() & set(range(begin // 32, end // 32)), "given back"


def test_fp32_and_kernels_without_it_pack_numbers_as_they_are() -> None:
    for level, dtype in (("best", torch.float32), ("x86-64-v3", torch.bfloat16)):
        if level in ALL_LEVELS:
            name, packer = choose_packer(CPU, dtype, kernels_of(level), compressed=True)
            assert isinstance(packer, KernelPacker)
            panels = packer.begin((64, 64), dtype)
            assert panels is not None
            assert (name, panels.bits) == ("kernel", 0)


def test_it_is_told_and_can_be_turned_off() -> None:
    packers("best")
    for compressed, name in ((True, "kernel-12bit"), (False, "kernel")):
        given = {"compress_weights": compressed}
        config = ServerConfig(model=ModelConfig(path="/models/any", name="any"), kernels=KernelsConfig(**given))
        found, packer = choose_linear(config, CPU, torch.bfloat16, cpu_kernels(), captured=False)
        assert isinstance(packer, KernelPacker)
        assert (found, packer.compresses) == (name, compressed)
    assert KernelsConfig().compress_weights
