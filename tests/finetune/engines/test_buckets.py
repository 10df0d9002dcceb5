"""Buckets of gradients are reduced where they lie: what counts as lying side by side, and that sums are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from finetune.engines.buckets import joined, make_bucket_late, reduce_in_place

BUFFER = torch.arange(24.0)


def test_neighbours_are_one_tensor_over_the_same_memory() -> None:
    buffer = BUFFER.clone()
    whole = joined([buffer[2:5], buffer[5:6], buffer[6:6], buffer[6:12].view(2, 3)])
    assert whole is not None
    assert torch.equal(whole, torch.arange(2.0, 12.0))
    whole.zero_()
    assert buffer.tolist() == [0, 1, *[0] * 10, *range(12, 24)]


@pytest.mark.parametrize(
    "parts",
    [
        [BUFFER[0:2], BUFFER[3:5]],
        [BUFFER[3:5], BUFFER[0:3]],
        [BUFFER[0:2], BUFFER[1:5]],
        [BUFFER[0:2], BUFFER.clone()[2:5]],
        [BUFFER[0:2], BUFFER.view(torch.int32)[2:5]],
        [BUFFER[0:6].view(2, 3).t(), BUFFER[6:8]],
        [BUFFER[0:6:2], BUFFER[3:5]],
    ],
    ids=["a gap", "the wrong order", "an overlap", "another storage", "another type", "transposed", "with steps"],
)
def test_what_is_not_side_by_side_is_not_joined(parts: list[torch.Tensor]) -> None:
    assert joined(parts) is None


class Zero:
    """As much of DeepSpeed's optimizer as reduces; two equal ranks."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def allreduce_bucket(self, bucket: Sequence[torch.Tensor], dtype: torch.dtype, *, divide: bool = True) -> torch.Tensor:
        self.seen.append(len(bucket))
        flat = bucket[0].view(-1) if len(bucket) == 1 else torch.cat([part.flatten() for part in bucket])
        return flat.mul_(1.0 if divide else 2.0).to(dtype)


@pytest.mark.parametrize(("begin", "joins"), [(3, 1), (4, 2)], ids=["side by side", "apart"])
def test_the_sums_are_those_of_the_parts(begin: int, joins: int) -> None:
    buffer = BUFFER.clone()
    parts = [buffer[0:3], buffer[begin:8]]
    expected = [2 * value for part in parts for value in part.tolist()]
    zero: Any = Zero()
    reduce_in_place(zero)
    assert zero.allreduce_bucket(parts, torch.float64, divide=False).tolist() == expected
    assert zero.seen == [joins]


class Collector:
    """As much of DeepSpeed's optimizer as makes buckets."""

    def __init__(self, *, overlap_comm: bool) -> None:
        self.overlap_comm, self.last, self.seen = overlap_comm, False, list[str]()

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.last

    def setup_buckets(self) -> None:
        self.seen.append("bucket")

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        self.seen.append(f"reduced, {pipeline_parallel}")


@pytest.mark.parametrize(("pipeline", "seen"), [(False, ["bucket", "reduced, False"]), (True, ["reduced, True"])])
def test_a_bucket_is_made_after_the_last_micro_batch(pipeline: bool, seen: list[str]) -> None:
    zero = Collector(overlap_comm=False)
    make_bucket_late(zero)
    for zero.last in (False, True):
        zero.setup_buckets()
    zero.reduce_gradients(pipeline_parallel=pipeline)
    assert zero.seen == seen


def test_a_bucket_is_made_in_the_last_micro_batch_where_communication_overlaps_it() -> None:
    zero = Collector(overlap_comm=True)
    make_bucket_late(zero)
    zero.setup_buckets()
    assert not zero.seen
    zero.last = True
    zero.setup_buckets()
    zero.reduce_gradients()
    assert zero.seen == ["bucket", "reduced, False"]
