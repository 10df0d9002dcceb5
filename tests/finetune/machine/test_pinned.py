"""Pinned memory of the size that is asked for, by a driver that stands for CUDA's."""

from __future__ import annotations

import gc

import pytest
import torch

from finetune.machine.pinned import PinnedMemory
from tests.finetune.machine.pinning import PAGE, Driver


@pytest.mark.parametrize("elements", [1, 1024, 1025, 3 << 18])
def test_a_buffer_takes_the_pages_that_it_fills_and_no_power_of_two(elements: int) -> None:
    driver = Driver()
    source = torch.arange(elements, dtype=torch.float32)
    pinned = PinnedMemory(driver).pin(source)
    assert torch.equal(pinned, source)
    assert list(driver.held.values()) == [-(-4 * elements // PAGE) * PAGE]
    assert pinned.data_ptr() in driver.held


def test_shape_and_type_are_those_of_the_example() -> None:
    pins = PinnedMemory(Driver())
    example = torch.zeros(3, 5, dtype=torch.bfloat16)
    assert pins.pin(example).shape == (3, 5)
    assert pins.pin(example, make_copy=False, match_shape=False).shape == (15,)
    assert pins.pin_empty(example, (2, 7)).dtype == torch.bfloat16
    assert pins.pin(torch.empty(0)).shape == (0,)


def test_a_view_keeps_the_pages_pinned_and_the_last_one_lets_go_of_them() -> None:
    driver = Driver()
    pins = PinnedMemory(driver)
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.data = pins.pin(torch.ones(5000)).view(50, 100)[10:].data
    gc.collect()
    assert pins.is_pinned(parameter)
    assert pins.num_bytes == sum(driver.held.values()) == 5 * PAGE
    parameter.data = torch.empty(0)
    gc.collect()
    assert driver.held == {}
    assert (pins.num_bytes, pins.most_bytes) == (0, 5 * PAGE)


def test_what_is_unpinned_can_still_be_read_and_is_let_go_of_once() -> None:
    driver = Driver()
    pins = PinnedMemory(driver)
    pinned = pins.pin(torch.full((10,), 7.0))
    assert pins.unpin(pinned)
    assert not pins.is_pinned(pinned)
    assert driver.held == {}
    assert not pins.unpin(pinned)
    assert pinned.tolist() == [7.0] * 10


def test_memory_that_cannot_be_pinned_is_told_with_what_is() -> None:
    pins = PinnedMemory(Driver(most=8 * PAGE))
    held = pins.pin(torch.zeros(8 * PAGE, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match=r"^offload: 0.00 GiB of memory could not be pinned beside 0.00 that"):
        pins.pin_empty(held, (9 * PAGE,))
    assert pins.num_bytes == 8 * PAGE, "what was refused is not counted"
