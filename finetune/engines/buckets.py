"""ZeRO-1 and ZeRO-2 reduce a bucket of gradients where it lies, and have one. No DeepSpeed here: its optimizer is handed in.

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
    setup_buckets: Callable[[], None]


def make_bucket_only(zero: _Collector, wanted: Callable[[], bool]) -> None:
    """Have a ``DeepSpeedZeroOptimizer`` make the bucket of a backward pass only where gradients are moved to one.

    It makes one whenever a gradient comes. In ZeRO-1 gradients stay where they are until the last micro-batch of a step, and in
    a pipeline until after it, in a bucket that is made then: the memory of the others is held, and never written.

    Args:
        wanted: asked in each backward pass.
    """
    make = zero.setup_buckets
    zero.setup_buckets = lambda: make() if wanted() else None


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
