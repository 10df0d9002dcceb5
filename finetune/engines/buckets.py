"""ZeRO-1 and ZeRO-2 reduce a bucket of gradients where it lies; ZeRO-1 makes it late. Their optimizer is handed in.

DeepSpeed collects gradients in one buffer, cuts that by the ranks that own the parts, joins the parts in new memory for the
all-reduce, and copies the sums back. The parts are neighbours, so the buffer itself can be reduced: the same sums, without two
copies of every gradient and without a second bucket of memory. What a rank does not own is overwritten by its sum, too; no rank
reads that before it makes the next gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Protocol

import torch


class _Reducer(Protocol):
    allreduce_bucket: Callable[..., torch.Tensor]


class _Collector(Protocol):
    overlap_comm: bool
    setup_buckets: Callable[[], None]
    reduce_gradients: Callable[..., None]

    def is_gradient_accumulation_boundary(self) -> bool: ...


def make_bucket_late(zero: _Collector) -> None:
    """Have a ``DeepSpeedZeroOptimizer`` of stage 1 make its bucket when gradients are moved to it.

    It makes one for the first gradient of a step, and holds it. The gradients stay where they are until the last micro-batch,
    in whose backward pass they are moved if communication overlaps it, and else after it. A pipeline makes another one then.
    """
    make, reduce = zero.setup_buckets, zero.reduce_gradients
    if zero.overlap_comm:
        zero.setup_buckets = lambda: make() if zero.is_gradient_accumulation_boundary() else None
        return

    @wraps(reduce)
    def reduce_in_bucket(pipeline_parallel: bool = False) -> None:
        if not pipeline_parallel:
            make()
        reduce(pipeline_parallel=pipeline_parallel)

    zero.setup_buckets = lambda: None
    zero.reduce_gradients = reduce_in_bucket


def reduce_in_place(zero: _Reducer) -> None:
    """Have a ``DeepSpeedZeroOptimizer`` reduce buckets where they lie, whenever their parts are neighbours."""
    reduce = zero.allreduce_bucket

    @wraps(reduce)
    def reduce_joined(bucket: Sequence[torch.Tensor], *args: object, **kwargs: object) -> torch.Tensor:
        whole = joined(bucket)
        return reduce(bucket if whole is None else [whole], *args, **kwargs)

    zero.allreduce_bucket = reduce_joined


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One flat tensor over the memory of ``parts``, if they lie one after the other in one storage; ``None`` if they do not."""
    first = parts[0]
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        same = part.dtype == first.dtype and part.untyped_storage().data_ptr() == storage
        if not (same and part.is_contiguous() and part.storage_offset() == end):
            return None
        end += part.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))
