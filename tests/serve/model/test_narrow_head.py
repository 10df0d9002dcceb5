"""What a narrower copy of a head finds is what the head's own product says, to the last bit, whatever the weights are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from serve.model import narrow_head
from serve.model.kernels.ahead import LEVELS as ALL_LEVELS
from serve.model.kernels.ahead import processor_words
from serve.model.linear import KernelPacker, Product
from serve.model.narrow_head import Kind, NarrowHead, kind_of_copy
from serve.model.pace import Pace
from serve.model.quantized import quantize
from serve.worker.sampling.native import NativeSampling
from tests.support.kernels import LEVELS, cpu_kernels, kernels_of

_V4: Final = "x86-64-v4"
HAS_V4: Final = {level.name: level.needs for level in ALL_LEVELS}[_V4] <= processor_words()
ALL: Final = (*LEVELS, _V4) if HAS_V4 else LEVELS
AT_ONCE: Final = Pace(lambda _: None)
ROWS: Final = (1, 2, 3, 5, 8, 9, 16, 31)


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    cpu_kernels()
    with torch.no_grad():
        yield


def kinds(kernels: ctypes.CDLL, dtype: torch.dtype) -> list[Kind]:
    """What a head of this type can be copied to, for any number of rows that tests ask for."""
    found = []
    if dtype == torch.float32 and kernels.tessera_linear_supported(1):
        found.append(Kind(torch.bfloat16, max(ROWS)))
    if kernels.tessera_linear_quantized_supported(int(dtype == torch.bfloat16)):
        found.append(Kind(torch.int8, max(ROWS)))
    return found


def head_of(kernels: ctypes.CDLL, weight_OI: Tensor, bias_O: Tensor | None = None) -> nn.Linear:
    head = nn.Linear(1, 1)
    head.forward = Product(KernelPacker(kernels)(weight_OI, bias_O))
    return head


def copied(kernels: ctypes.CDLL, head: nn.Module, kind: Kind) -> NarrowHead:
    narrow = NarrowHead(head, kernels, kind)
    narrow.build(AT_ONCE)
    return narrow


def expected(kernels: ctypes.CDLL, head: nn.Module, hidden_RI: Tensor) -> tuple[Tensor, Tensor]:
    return NativeSampling(kernels).peaks(head(hidden_RI).float())


def require_same(kernels: ctypes.CDLL, head: nn.Module, narrow: NarrowHead, hidden_RI: Tensor) -> int:
    """How many panels the head itself computed."""
    found = narrow.likeliest(hidden_RI)
    assert found is not None, "few logits may be the largest"
    peaks_R, places_R = expected(kernels, head, hidden_RI)
    assert torch.equal(found.peaks_R, peaks_R)
    assert torch.equal(found.places_R, places_R)
    return found.panels


@pytest.mark.parametrize("level", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(9000, 64), (5003, 96), (50, 32)])
def test_it_finds_what_the_head_says(level: str, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    kernels = kernels_of(level)
    torch.manual_seed(outputs)
    for kind in kinds(kernels, dtype):
        for with_bias in (False, True):
            weight = torch.randn(outputs, inputs).to(dtype)
            head = head_of(kernels, weight, torch.randn(outputs).to(dtype) if with_bias else None)
            narrow = copied(kernels, head, kind)
            narrow._ready.search.most_panels = -(-outputs // 32)  # type: ignore[union-attr]  # it was built
            for rows in ROWS:
                wider = torch.randn(rows, inputs + 8).to(dtype)
                require_same(kernels, head, narrow, wider[:, :inputs])


@pytest.mark.parametrize("level", ALL)
def test_few_panels_of_a_large_head_are_computed_after_the_copy(level: str) -> None:
    """Of what is random, of which the largest stand out least."""
    kernels = kernels_of(level)
    torch.manual_seed(0)
    for dtype, most in ((torch.float32, 12), (torch.bfloat16, 60)):
        kind = kind_of_copy(kernels, dtype, 256)
        if kind is None:
            assert level == _V4
            continue
        head = head_of(kernels, torch.randn(30000, 256).to(dtype))
        narrow = copied(kernels, head, kind)
        for _ in range(10):
            assert 1 <= require_same(kernels, head, narrow, torch.randn(1, 256).to(dtype)) <= most


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_first_of_equals_and_of_near_equals_is_found(data: st.DataObject) -> None:
    """Rows that are the same, that differ by less than the copy tells, and that are far larger or smaller than others."""
    kernels = cpu_kernels()
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    all_kinds = kinds(kernels, dtype)
    if not all_kinds:
        pytest.skip("this processor has no copy of the type")
    kind = data.draw(st.sampled_from(all_kinds))
    torch.manual_seed(data.draw(st.integers(0, 1 << 30)))
    outputs, inputs = data.draw(st.integers(33, 700)), 2 * data.draw(st.integers(1, 40))
    weight = torch.randn(outputs, inputs)
    hidden = torch.randn(data.draw(st.integers(1, 9)), inputs)
    like = data.draw(st.integers(0, outputs - 1))
    for place in data.draw(st.lists(st.integers(0, outputs - 1), max_size=8)):
        weight[place] = weight[like] * (1 + data.draw(st.sampled_from([0.0, 1e-7, -1e-6, 1e-4, 1e-3, -1e-2])))
    weight *= 10.0 ** data.draw(st.integers(-12, 12))
    weight[data.draw(st.integers(0, outputs - 1))] *= 10.0 ** data.draw(st.integers(-10, 3))
    hidden[:, data.draw(st.integers(0, inputs - 1))] *= 10.0 ** data.draw(st.integers(-6, 4))
    head = head_of(kernels, weight.to(dtype))
    narrow = copied(kernels, head, kind)
    assert narrow._ready is not None
    narrow._ready.search.most_panels = outputs
    require_same(kernels, head, narrow, hidden.to(dtype))


HALF: Final = 256
MIDDLE: Final = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8]).repeat_interleave(HALF)
"""In the middle between two numbers of bf16: the first half of them becomes smaller, the other larger by as much."""
SIGNS: Final = torch.tensor([1.0, -1.0]).repeat_interleave(HALF)


def whole_numbers() -> tuple[Tensor, Tensor]:
    """A row of which a half of each number is lost in int8, where its scale is 1, and inputs that add them all up."""
    row_I = torch.tensor([2.5, -1.5]).repeat_interleave(HALF)
    row_I[0] = 127.0
    hidden_I = torch.ones(2 * HALF)
    hidden_I[0] = 0.0
    return row_I, hidden_I


@pytest.mark.parametrize("level", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_is_found_where_the_copy_takes_another_for_larger(level: str, dtype: torch.dtype) -> None:
    """All that is lost of one row's products adds up: of its weights, or of the inputs."""
    kernels = kernels_of(level)
    cases = {torch.int8: [whole_numbers()], torch.bfloat16: [(SIGNS * MIDDLE, torch.ones(2 * HALF)), (SIGNS, MIDDLE)]}
    for kind in kinds(kernels, dtype):
        for row_I, hidden_I in cases[kind.dtype]:
            exact = float(row_I @ hidden_I)
            copied_as = -2.0 if kind.dtype == torch.int8 else float(row_I.bfloat16().float() @ hidden_I.bfloat16().float())
            assert copied_as < exact
            weight = torch.zeros(320, 2 * HALF)
            weight[:, 1] = -1000.0
            weight[5] = row_I
            weight[200, 1] = 0.2 * copied_as + 0.8 * exact  # the largest of the copy, not of the head
            head = head_of(kernels, weight.to(dtype))
            narrow = copied(kernels, head, kind)
            narrow._ready.search.most_panels = 2  # type: ignore[union-attr]  # it was built
            found = narrow.likeliest(hidden_I[None].to(dtype))
            assert found is not None
            assert found.places_R.tolist() == [5]
            assert found.panels == 2
            require_same(kernels, head, narrow, hidden_I[None].to(dtype))


@pytest.mark.parametrize("level", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_logit_is_farther_from_the_copy_than_the_bound(level: str, dtype: torch.dtype) -> None:
    """Of inputs that are what a row of weights has lost, too."""
    kernels = kernels_of(level)
    torch.manual_seed(3)
    weight = torch.cat((torch.randn(600, 2 * HALF), MIDDLE.expand(200, -1), torch.rand(224, 2 * HALF) + 1)).to(dtype)
    for kind in kinds(kernels, dtype):
        head = head_of(kernels, weight)
        narrow = copied(kernels, head, kind)
        ready = narrow._ready
        assert ready is not None
        ready.search.most_panels = len(weight)
        narrow_OI = quantize(weight, 8, 0).dequantized() if kind.dtype == torch.int8 else weight.bfloat16().float()
        lost_2I = 100 * (weight.float() - narrow_OI)[:2]
        hidden = torch.cat((lost_2I, torch.randn(2, 2 * HALF), MIDDLE[None])).to(dtype)
        require_same(kernels, head, narrow, hidden)
        _, losses_O, norms_O, moved_RI, _, narrow_RO, *_ = ready.held
        assert isinstance(losses_O, Tensor)
        assert isinstance(norms_O, Tensor)
        assert isinstance(moved_RI, Tensor)
        assert isinstance(narrow_RO, Tensor)
        hidden_RI = hidden.double()
        moved_R = torch.zeros(len(hidden), dtype=torch.float64)
        if kind.dtype == torch.bfloat16:
            moved_R = (hidden_RI - moved_RI[: len(hidden)].double()).norm(dim=1)
        logits_RO = narrow_RO[: len(hidden)].double()
        products_RO = hidden_RI.norm(dim=1)[:, None] * losses_O.double() + moved_R[:, None] * norms_O.double()
        bound_RO = 1.01 * (products_RO + ready.search.rounding * 2 * logits_RO.abs())
        distance_RO = (head(hidden).double() - logits_RO).abs()
        assert (distance_RO <= bound_RO).all()
        assert all(distance_RO[row, row] > 0.4 * bound_RO[row, row] for row in range(2)), "it is about what it has to be"


@pytest.mark.parametrize("level", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponent", [-19, -21, -22, -24])
def test_weights_whose_squares_are_zero_in_fp32_have_their_bound_too(level: str, dtype: torch.dtype, exponent: int) -> None:
    """Of logits that are what is left of products that cancel one another."""
    kernels = kernels_of(level)
    torch.manual_seed(-exponent)
    weight, hidden = torch.randn(300, 64), torch.randn(4, 64)
    weight[:, 1::2], hidden[:, 1::2] = weight[:, ::2] * 1.003, -hidden[:, ::2]
    for kind in kinds(kernels, dtype):
        head = head_of(kernels, (weight * 10.0**exponent).to(dtype))
        narrow = copied(kernels, head, kind)
        narrow._ready.search.most_panels = 10  # type: ignore[union-attr]  # it was built
        for scale in (1.0, 1e3):
            require_same(kernels, head, narrow, (hidden * scale).to(dtype))


@pytest.mark.parametrize("level", ALL)
def test_inputs_that_products_of_pairs_take_for_zero_have_their_bound_too(level: str) -> None:
    kernels = kernels_of(level)
    torch.manual_seed(5)
    for kind in kinds(kernels, torch.float32):
        head = head_of(kernels, torch.randn(300, 64) * 1e12)
        narrow = copied(kernels, head, kind)
        narrow._ready.search.most_panels = 10  # type: ignore[union-attr]  # it was built
        require_same(kernels, head, narrow, torch.randn(3, 64) * 5e-39)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_is_left_to_the_head(dtype: torch.dtype, value: float) -> None:
    kernels = cpu_kernels()
    torch.manual_seed(1)
    for kind in kinds(kernels, dtype):
        head = head_of(kernels, torch.randn(400, 64).to(dtype))
        narrow = copied(kernels, head, kind)
        hidden = torch.randn(3, 64).to(dtype)
        hidden[1, 7] = value
        assert narrow.likeliest(hidden) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_not_finite_is_never_overlooked(dtype: torch.dtype) -> None:
    kernels = cpu_kernels()
    torch.manual_seed(1)
    for kind in kinds(kernels, dtype):
        weight = torch.randn(400, 64).to(dtype)
        weight[333, 5] = float("nan")
        head = head_of(kernels, weight)
        assert copied(kernels, head, kind).likeliest(torch.randn(2, 64).to(dtype)) is None


def test_logits_that_are_all_alike_are_left_to_the_head_and_after_a_while_all_are() -> None:
    kernels = cpu_kernels()
    head = head_of(kernels, torch.ones(4096, 64))
    narrow = copied(kernels, head, Kind(torch.bfloat16, 4))
    hidden = torch.ones(1, 64)
    for _ in range(narrow_head._FEW_CALLS):
        assert narrow.serves(1)
        assert narrow.likeliest(hidden) is None
    assert not narrow.serves(1)
    assert narrow.likeliest(hidden) is None


def test_it_serves_the_head_that_it_was_copied_from_and_few_rows() -> None:
    kernels = cpu_kernels()
    head = head_of(kernels, torch.randn(100, 64))
    narrow = NarrowHead(head, kernels, Kind(torch.bfloat16, 4))
    assert not narrow.serves(1), "it is not there yet"
    narrow.build(AT_ONCE)
    assert [narrow.serves(rows) for rows in (0, 1, 4, 5)] == [False, True, True, False]
    before, other = head.forward.matmul, head_of(kernels, torch.randn(100, 64))
    head.forward.matmul = other.forward.matmul  # weights are exchanged
    assert not narrow.serves(1)
    head.forward.matmul = before  # and back
    assert narrow.serves(1)
    head.forward.matmul = other.forward.matmul
    narrow.build(AT_ONCE)
    assert narrow.serves(1)
    require_same(kernels, other, narrow, torch.randn(2, 64))


def test_a_head_that_is_not_packed_yet_is_not_copied() -> None:
    kernels = cpu_kernels()
    packer, weight = KernelPacker(kernels), torch.randn(100, 64)
    panels = packer.begin((100, 64), torch.float32, later=True)
    assert panels is not None
    panels.read_from(weight)
    head = nn.Linear(1, 1)
    head.forward = Product(packer.product(panels, None))
    narrow = NarrowHead(head, kernels, Kind(torch.bfloat16, 4))
    narrow.build(AT_ONCE)
    assert not narrow.serves(1)
    panels.put(0, weight)
    panels.settle()
    narrow.build(AT_ONCE)
    assert narrow.serves(1)


def test_what_a_copy_is_made_for() -> None:
    kernels = cpu_kernels()
    head = head_of(kernels, torch.randn(100, 64))
    whole_bytes = 100 * 64 * 4
    assert NarrowHead.of(head, kernels, whole_bytes * 16) is not None
    assert NarrowHead.of(head, kernels, whole_bytes * 17) is None, "it would gain next to nothing"
    assert NarrowHead.of(head, None, whole_bytes) is None
    assert NarrowHead.of(nn.Linear(64, 100), kernels, whole_bytes) is None, "it is computed by torch"
    assert NarrowHead.of(nn.Sequential(head), kernels, whole_bytes) is None, "what follows may make equals of its logits"
    assert NarrowHead.of(head_of(kernels, torch.randn(100, 63)), kernels, whole_bytes) is None, "bf16 comes in pairs"


def test_a_copy_that_would_take_much_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_head, "MOST_BYTES", 100 * 64 * 2 - 1)
    kernels = cpu_kernels()
    assert NarrowHead.of(head_of(kernels, torch.randn(100, 64)), kernels, 1) is None
