"""Recorded lists of kernels' calls: what is replayed with other inputs, and the kernels between products and attention."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from serve.model.cuda.graphs import CaptureError
from serve.model.linear import choose_packer
from serve.model.recording import Recorder, StepMemory, Steps, anew, row_stride
from serve.worker import wire
from tests.support.kernels import LEVELS, kernels_of

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=[(level, threads) for level in LEVELS for threads in (1, 2)])
def steps(request: pytest.FixtureRequest) -> Iterator[Steps]:
    level, threads = request.param
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield Steps(kernels_of(level))
    torch.set_num_threads(before)


def bits(tensor: Tensor) -> list[int]:
    whole: list[int] = tensor.contiguous().view(torch.int32 if tensor.itemsize == 4 else torch.int16).flatten().tolist()
    return whole


def replayed(
    steps: Steps, function: Callable[..., Tensor], first: list[Tensor], second: list[Tensor]
) -> tuple[Tensor, Recorder]:
    """What a replay gives of the second inputs, recorded with the first."""
    with torch.inference_mode():
        inputs = [tensor.clone() for tensor in first]
        with Recorder(steps, StepMemory()) as recorder:
            out = function(*inputs)
        assert torch.equal(out, function(*first))
        program = recorder.program()
        for mine, other in zip(inputs, second, strict=True):
            mine.copy_(other)
        program.replay()
        return out, recorder


def by_gate(both: Tensor, more: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return up * gate + more


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], bool]] = {
    "a sum": (lambda x, y: x + y, [(1, 5, 37), (1, 5, 37)], True),
    "a sum with one row": (lambda x, y: y + x * y, [(1, 3, 65), (65,)], True),
    "sums in place": (lambda x, y: x.clone().add_(y).add_(y), [(1, 4, 31), (31,)], False),
    "halves of a row": (by_gate, [(1, 6, 64), (1, 6, 32)], True),
    "sums one after the other": (lambda x, y: ((x + y) + (x * y)) + (x + x), [(1, 8, 129), (1, 8, 129)], True),
    "wide, narrow and wide again": (lambda x, y: (x + x)[..., :16] + y + (y * y), [(1, 8, 48), (1, 8, 16)], True),
    "a copy in fp32": (lambda x, y: (x + y).float(), [(1, 3, 9000), (1, 3, 9000)], True),
    "what no kernel computes": (lambda x, y: (x.sin() + y).amax(dim=1), [(1, 4, 40), (1, 4, 40)], False),
    "results of several": (lambda x, y: torch.topk(x + y, 3, dim=-1)[0] * 1.0, [(1, 4, 40), (1, 4, 40)], False),
    "views": (lambda x, y: (x.view(4, 2, 20).transpose(0, 1) + y).reshape(8, 20), [(1, 4, 40), (2, 4, 20)], False),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_replay_gives_the_bits_that_torch_gives_of_its_own_inputs(name: str, dtype: torch.dtype, steps: Steps) -> None:
    function, shapes, by_kernels = FUNCTIONS[name]
    torch.manual_seed(1)
    first, second = ([(torch.randn(shape) * 3).to(dtype) for shape in shapes] for _ in range(2))
    out, recorder = replayed(steps, function, first, second)
    assert bits(out) == bits(function(*second))
    assert (recorder.program().parts == 1) == by_kernels
    assert (not recorder.torch_operations) or not by_kernels


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_table_are_looked_up_by_the_ids_of_the_replay(dtype: torch.dtype, steps: Steps) -> None:
    table = torch.randn(50, 33).to(dtype)
    first, second = torch.tensor([[3, 4, 5]]), torch.tensor([[49, 0, 3]])
    out, recorder = replayed(steps, lambda ids: nn.functional.embedding(ids, table), [first], [second])
    assert torch.equal(out, table[second])
    assert recorder.program().parts == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_whose_weight_onednn_has_packed_is_replayed(dtype: torch.dtype, steps: Steps) -> None:
    """As layers of bf16 with an odd number of inputs are."""
    packer = choose_packer(torch.device("cpu"), dtype, None)[1]
    if packer is None:
        pytest.skip("oneDNN packs nothing of this type on this processor")
    product = packer(torch.randn(24, 33).to(dtype), None)
    first, second = (torch.randn(1, 4, 33).to(dtype) for _ in range(2))
    out, _ = replayed(steps, lambda x: product(x) + 1.0, [first], [second])
    assert torch.equal(out, product(second) + 1.0)


def test_what_python_must_do_anew_is_done_in_its_place(steps: Steps) -> None:
    seen: list[float] = []

    def function(x: Tensor) -> Tensor:
        y = x + x
        anew(lambda: seen.append(float(y.sum())))
        return y + x

    with torch.inference_mode():
        x = torch.ones(1, 1, 4)
        with Recorder(steps, StepMemory()) as recorder:
            out = function(x)
        x.fill_(2.0)
        recorder.program().replay()
    assert seen == [8.0, 16.0]
    assert out.tolist() == [[[6.0] * 4]]


def test_a_replay_is_left_where_a_message_overtakes_it_and_gives_all_when_it_is_done_again(steps: Steps) -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(40):
            x = x + x * 0.5
        return x

    ours, theirs = socket.socketpair()
    with torch.inference_mode(), ours, theirs:
        x = torch.ones(1, 3, 64)
        with Recorder(steps, StepMemory()) as recorder:
            out = function(x)
        program, expected = recorder.program(), out.clone()
        out.zero_()
        wire.send(ours, b"in its turn")
        assert program.replay(theirs.fileno())
        assert torch.equal(out, expected)
        wire.receive(theirs)
        out.zero_()
        wire.send(ours, b"first", overtakes=True)
        assert not program.replay(theirs.fileno())
        assert not out.any(), "it was done to its end"
        wire.receive(theirs)
        assert program.replay(theirs.fileno())
        assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "function",
    [lambda x: x * x.amax().item(), lambda x: x + torch.tensor([1.0]), lambda x: x[x > 0]],
    ids=["a number", "numbers of the host", "a shape"],
)
def test_what_a_replay_could_not_give_is_refused(function: Any, steps: Steps) -> None:
    with torch.inference_mode(), pytest.raises(CaptureError), Recorder(steps, StepMemory()):
        function(torch.ones(4))
    assert torch.ones(2).sum() == 2, "nothing is recorded any more"


def test_memory_is_given_again_when_nothing_refers_to_it_any_more() -> None:
    memory = StepMemory()
    first = memory.empty((3, 5), torch.float32)
    place, view = first.data_ptr(), first[1:]
    del first
    second = memory.empty((15,), torch.float32)
    assert second.data_ptr() != place, "a view refers to it"
    del view
    third = memory.empty((2, 5), torch.bfloat16)
    assert third.data_ptr() == place
    assert all(tensor.data_ptr() % 64 == 0 for tensor in (second, third))
    like = memory.like(torch.empty(4, 6).t())
    assert (like.shape, like.stride()) == ((6, 4), (1, 6))


def test_strides_of_rows() -> None:
    x = torch.empty(1, 4, 12)
    assert row_stride(x, 12) == 12
    assert row_stride(x[..., :5], 5) == 12
    assert row_stride(x[:, :1], 12) == 0
    assert row_stride(x.view(2, 2, 12), 12) == 12
    assert row_stride(x.view(4, 3, 4)[:, :2], 4) is None
    assert row_stride(x.transpose(1, 2), 4) is None
    assert row_stride(torch.empty(()), 1) is None
