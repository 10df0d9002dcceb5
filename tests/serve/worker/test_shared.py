"""Ranks that exchange activations through memory: sums to the bit, whatever their sizes, and nobody a round too early."""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from serve.model.kernels.build import load_cpu_kernels
from serve.worker.progress import Progress
from serve.worker.shared import SharedMemory

SLOT = (1 << 20) // 4
"""Numbers in fp32 that travel in one round."""


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    return load_cpu_kernels()


@contextmanager
def group(kernels: ctypes.CDLL, size: int) -> Iterator[list[SharedMemory]]:
    """As many ranks, each with a mapping of its own, for threads to be."""
    descriptor = os.memfd_create("tessera-test")
    try:
        ranks = [SharedMemory(kernels, descriptor, rank, size) for rank in range(size)]
    finally:
        os.close(descriptor)
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def each(ranks: list[SharedMemory], act: Callable[[int, SharedMemory], object]) -> list[object]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(act, range(len(ranks)), ranks, timeout=400))


def summed(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_of_any_length_are_the_same_bits_on_every_rank(kernels: ctypes.CDLL, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    lengths = [1, 7, 768, 4097, SLOT, 2 * SLOT + 3, 5 * SLOT, 0, 31]
    parts = [[torch.randn(length, generator=generator).to(dtype) for length in lengths] for _ in range(size)]
    wanted = [summed([parts[rank][at] for rank in range(size)]) for at in range(len(lengths))]
    with group(kernels, size) as ranks:

        def act(rank: int, shared: SharedMemory) -> list[Tensor]:
            own = [part.clone() for part in parts[rank]]
            for part in own:
                shared.sum_(part)
            return own

        for got in each(ranks, act):
            assert isinstance(got, list)
            assert all(torch.equal(part, want) for part, want in zip(got, wanted, strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_columns_come_side_by_side_to_the_first_rank(kernels: ctypes.CDLL, size: int) -> None:
    generator = torch.Generator().manual_seed(5)
    cases = [(1, 101), (64, 5001), (3, SLOT), (0, 7), (700, 1000)]
    with group(kernels, size) as ranks:
        for rows, columns in cases:
            widths = tuple(columns - (rank > 0) - 2 * (rank > 1) for rank in range(size))
            parts = [torch.randn(rows, width, generator=generator) for width in widths]

            def act(
                rank: int, shared: SharedMemory, parts: list[Tensor] = parts, widths: tuple[int, ...] = widths
            ) -> Tensor | None:
                return shared.gather_columns(parts[rank], widths)

            first, *others = each(ranks, act)
            assert isinstance(first, Tensor)
            assert torch.equal(first, torch.cat(parts, dim=1))
            assert others == [None] * (size - 1)


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_hears_the_numbers_of_the_first(kernels: ctypes.CDLL, size: int) -> None:
    draw = random.Random(1)
    counts = 1, 256, 0, SLOT + 3
    parts = [[[draw.randrange(-(1 << 63), 1 << 63) for _ in range(count)] for count in counts] for _ in range(size)]
    with group(kernels, size) as ranks:
        for got in each(ranks, lambda rank, shared: [shared.numbers_of_first(numbers) for numbers in parts[rank]]):
            assert got == parts[0]


def test_ranks_that_take_turns_at_being_late_never_read_what_is_not_there_yet(kernels: ctypes.CDLL) -> None:
    rounds, size = 3000, 3
    with group(kernels, size) as ranks:

        def act(rank: int, shared: SharedMemory) -> list[float]:
            draw, told = random.Random(rank), []
            numbers = torch.empty(16)
            for number in range(rounds):
                if draw.random() < 0.02:
                    time.sleep(draw.random() / 1000)  # longer than another spins: it sleeps too, and has to be woken
                numbers.fill_(float(number * (rank + 1)))
                shared.sum_(numbers)
                told.append(float(numbers[number % 16]))
                if number % 7 == 0:
                    shared.gather_columns(numbers.view(4, 4), (4,) * size)
                if number % 5 == 0:
                    assert shared.numbers_of_first([number, rank]) == [number, 0]
            return told

        for got in each(ranks, act):
            assert got == [float(number * 6) for number in range(rounds)]


def test_tensors_of_any_shape_are_added_up_whole(kernels: ctypes.CDLL) -> None:
    shapes: list[tuple[int, ...]] = [(), (3, 5), (1, 7, 768), (2, 0), (4, 1)]
    with group(kernels, 2) as ranks:
        for shape in shapes:
            parts = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
            wanted = parts[0] + parts[1]
            each(ranks, lambda rank, shared, parts=parts: shared.sum_(parts[rank]))
            assert all(torch.equal(part, wanted) for part in parts)


def test_who_waits_in_a_sum_has_counted_it_and_who_does_not_come_has_not(kernels: ctypes.CDLL) -> None:
    """By that the one is known for whom the others wait, also where recorded steps are replayed and Python counts nothing."""
    progresses = [Progress(), Progress()]
    descriptor = os.memfd_create("tessera-test")
    first, second = (SharedMemory(kernels, descriptor, rank, 2, progresses[rank].in_kernels) for rank in range(2))
    os.close(descriptor)
    for progress in progresses:
        progress.mark()
    waiting = threading.Thread(target=first.sum_, args=(torch.ones(3 * SLOT),))
    waiting.start()
    while progresses[0].count < 2:
        waiting.join(0.01)
    assert progresses[1].count == 1
    second.sum_(torch.ones(3 * SLOT))
    waiting.join(400)
    assert [progress.count for progress in progresses] == [2, 2], "one sum, in however many rounds"
    for stage in (1, 1, 0, 2):
        progresses[0].reach(stage, 2)
    assert progresses[0].count == 2 * (1 << 20)
    for shared in (first, second):
        shared.close()


def test_a_call_waits_for_the_last_rank_however_late_it_is(kernels: ctypes.CDLL) -> None:
    with group(kernels, 2) as (first, second):
        early, late = torch.ones(3), torch.ones(3)
        waiting = threading.Thread(target=first.sum_, args=(early,))
        waiting.start()
        waiting.join(0.05)  # it spins no longer
        assert waiting.is_alive()
        second.sum_(late)
        waiting.join(400)
        assert early.tolist() == late.tolist() == [2.0] * 3


def test_nan_and_infinity_arrive(kernels: ctypes.CDLL) -> None:
    with group(kernels, 2) as ranks:
        for dtype in (torch.float32, torch.bfloat16):
            parts = [torch.tensor([1.0, float("nan"), float("inf"), 1e38], dtype=dtype) for _ in ranks]
            each(ranks, lambda rank, shared, parts=parts: shared.sum_(parts[rank]))
            for part in parts:
                assert part[0] == 2.0
                assert torch.isnan(part[1])
                assert part[2] == float("inf")
                assert torch.equal(part[3], torch.tensor(2e38, dtype=dtype))
