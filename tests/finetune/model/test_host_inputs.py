"""Block inputs that wait in pinned host memory: here with a driver and copies that stand for CUDA's."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from finetune.machine.pinned import PinnedMemory
from finetune.model import host_inputs, recompute
from finetune.model.host_inputs import CudaCopies, HostInputs
from finetune.model.recompute import computed_again
from tests.finetune.machine.pinning import PAGE, Driver

FLOATS = PAGE // 4
"""Numbers that fill a page."""


class Copies:
    """Copies at once, and remembers in which order and after what."""

    def __init__(self) -> None:
        self.order: list[tuple[str, int, Any]] = []
        self._events = 0

    def out(self, tensor: Tensor, host: Tensor, after: Any) -> Any:
        host.copy_(tensor)
        return self._note("out", host, after)

    def back(self, host: Tensor, device: torch.device, after: Any) -> tuple[Tensor, Any]:
        return host.clone(), self._note("back", host, after)

    def _note(self, what: str, host: Tensor, after: Any) -> int:
        self._events += 1
        self.order.append((what, host.data_ptr(), after))
        return self._events


class Made:
    """Inputs on the host, and what they pinned."""

    def __init__(self) -> None:
        self.driver, self.copies = Driver(), Copies()
        self.memory = PinnedMemory(self.driver)
        self.inputs = HostInputs(self.memory, self.copies, "cpu")

    def step(self, *sizes: int) -> Tensor:
        """A forward and a backward pass through three blocks for each size; returns the gradients."""
        torch.manual_seed(0)
        found = []
        for size in sizes:
            x = torch.randn(size, requires_grad=True)
            y = x
            for _ in range(3):
                with self.inputs.hooks():
                    y = checkpoint(torch.sin, y, use_reentrant=True)
            y.sum().backward()
            assert x.grad is not None
            found.append(x.grad)
        return torch.cat(found)


def test_gradients_are_those_of_inputs_that_stay_and_steps_share_their_buffers() -> None:
    made = Made()
    expected = [torch.randn(FLOATS, generator=torch.Generator().manual_seed(0)).requires_grad_()]
    torch.sin(torch.sin(torch.sin(expected[0]))).sum().backward()
    assert expected[0].grad is not None
    for _ in range(3):
        assert torch.equal(made.step(FLOATS), expected[0].grad)
    assert list(made.driver.held.values()) == [PAGE] * 3, "an input of each block, exactly, and once for all steps"
    assert made.memory.most_bytes == 3 * PAGE


def test_a_buffer_is_written_anew_when_it_was_read() -> None:
    made = Made()
    made.step(FLOATS)
    read = {place: event for event, (what, place, _) in enumerate(made.copies.order, 1) if what == "back"}
    made.copies.order.clear()
    made.step(FLOATS)
    assert [(what, after) for what, place, after in made.copies.order[:3]] == [
        ("out", read[place]) for _, place, _ in made.copies.order[:3]
    ]
    outs = {place: 6 + number for number, (_, place, _) in enumerate(made.copies.order[:3], 1)}
    assert [(what, after) for what, place, after in made.copies.order[3:]] == [
        ("back", outs[place]) for _, place, _ in made.copies.order[3:]
    ]


def test_a_buffer_that_was_never_read_is_written_anew_after_it_was_written() -> None:
    """As where a forward pass is given up."""
    made = Made()
    with made.inputs.hooks():
        y = checkpoint(torch.sin, torch.ones(FLOATS, requires_grad=True), use_reentrant=True)
    del y
    gc.collect()
    made.step(FLOATS)
    assert made.copies.order[1][::2] == ("out", 1)


def test_other_sizes_do_not_come_on_top_of_what_is_free_of_those_before() -> None:
    made = Made()
    made.step(FLOATS)
    made.step(2 * FLOATS)
    assert made.memory.num_bytes == 6 * PAGE
    made.step(FLOATS)
    gc.collect()
    assert (made.memory.num_bytes, made.memory.most_bytes) == (3 * PAGE, 6 * PAGE)


def test_several_sizes_at_once_are_kept_for_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    with made.inputs.hooks():
        x, z = torch.ones(FLOATS, requires_grad=True), torch.ones(2 * FLOATS, requires_grad=True)
        loss = checkpoint(torch.sin, x, use_reentrant=True).sum() + checkpoint(torch.sin, z, use_reentrant=True).sum()
    loss.backward()
    pinned = dict(made.driver.held)
    with made.inputs.hooks():
        loss = checkpoint(torch.sin, z, use_reentrant=True).sum() + checkpoint(torch.sin, x, use_reentrant=True).sum()
    assert made.driver.held == pinned
    loss.backward()


def test_what_lies_elsewhere_stays_there() -> None:
    made = Made()
    inputs = HostInputs(made.memory, made.copies)
    x = torch.ones(5, requires_grad=True)
    with inputs.hooks():
        y = checkpoint(torch.sin, x, use_reentrant=True)
    y.sum().backward()
    assert made.copies.order == []


def test_blocks_of_a_gpu_wait_there_and_those_of_a_cpu_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    monkeypatch.setattr(recompute, "cuda_inputs", lambda: made.inputs)
    with recompute._kept("cpu", pin_memory=True):
        y = checkpoint(torch.sin, torch.ones(FLOATS, requires_grad=True), use_reentrant=True)
    y.sum().backward()
    assert [what for what, *_ in made.copies.order] == ["out", "back"]
    computed_again(torch.sin, "cpu", torch.ones(5, requires_grad=True)).sum().backward()
    assert len(made.copies.order) == 2
    assert host_inputs.cuda_inputs() is host_inputs.cuda_inputs(), "one for all blocks"


class Stream:
    """A stream that writes down what is asked of it."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said, self.events = name, said, 0

    def wait_stream(self, other: Stream) -> None:
        self.said.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.said.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.said.append(f"event {self.events} of {self.name}")
        self.events += 1
        return self.said[-1]


def test_copies_of_a_gpu_wait_for_one_another_and_the_host_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    main, device = Stream("main", said), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: main)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream("side", said))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: said.append(f"on {stream.name}") or nullcontext())  # type: ignore[func-returns-value]  # None is meant
    copies, tensors, hosts = CudaCopies(), [torch.arange(4.0) + n for n in range(4)], [torch.zeros(4) for _ in range(4)]
    held = [weakref.ref(tensor) for tensor in tensors]
    first = copies.out(tensors[0], hosts[0], None)
    assert said == ["side waits for main", "on side", "event 0 of side"]
    second = copies.out(tensors[1], hosts[1], None)
    said.clear()
    del tensors[0]
    gc.collect()
    assert held[0]() is not None, "it may still be read"
    copies.out(tensors[1], hosts[2], None)
    assert said[-1] == f"main waits for {first}", "and what is computed then may have its memory"
    gc.collect()
    assert held[0]() is None
    assert torch.equal(hosts[0], torch.arange(4.0))
    said.clear()
    found, read = copies.back(hosts[1], device, second)
    assert torch.equal(found, torch.arange(4.0) + 1)
    assert said[2:] == [f"main waits for {second}", read], "behind all that were on their way"
    assert said[:2] == [f"main waits for {second}", "main waits for event 2 of side"]
    said.clear()
    copies.out(tensors[2], hosts[1], read)
    assert said[:3] == ["side waits for main", f"side waits for {read}", "on side"]
