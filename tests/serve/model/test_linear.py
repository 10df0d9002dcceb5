"""Packed linear layers against the definition, in double precision."""

from __future__ import annotations

import pytest
import torch

from serve.model import linear
from serve.model.kernels.build import KernelUnavailable

CPU = torch.device("cpu")


@pytest.fixture(params=["best", "without kernels"])
def packer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> linear.Packer | None:
    if request.param == "without kernels":

        def unavailable() -> None:
            raise KernelUnavailable("hidden by the test")

        monkeypatch.setattr(linear, "load_cpu_kernels", unavailable)
    return linear.choose_packer(CPU, torch.float32)


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


@pytest.mark.parametrize("rows", [1, 7, 8, 33])
@pytest.mark.parametrize(("outputs", "inputs"), [(33, 64), (100, 255), (96, 1024)])
def test_bf16_rounds_once(rows: int, outputs: int, inputs: int) -> None:
    packer = linear.choose_packer(CPU, torch.bfloat16)
    if packer is None:
        pytest.skip("this processor has no packed bf16 route")
    torch.manual_seed(outputs)
    weight, x, bias = (torch.randn(*shape).bfloat16() for shape in ((outputs, inputs), (rows, inputs), (outputs,)))
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(packer(weight, bias)(x).double(), expected, rtol=2**-7, atol=0.02)


def test_rows_need_not_lie_next_to_one_another() -> None:
    packer = linear.choose_packer(CPU, torch.float32)
    assert packer is not None
    weight, wide = torch.randn(40, 24), torch.randn(5, 48)
    product = packer(weight, None)
    torch.testing.assert_close(product(wide[:, :24]), wide[:, :24] @ weight.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(product(wide[:, ::2]), wide[:, ::2] @ weight.T, rtol=1e-5, atol=1e-5)
