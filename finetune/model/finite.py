"""Weights as they are loaded: each is looked at once, while it is in memory, and one that is not finite is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from checkpoint.dtypes import dtype_name
from finetune.errors import WeightNotFinite


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are. The extremes of a tensor are NaN as soon as one element is; this needs no second tensor."""
    return bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all()) if tensor.numel() else True


def check_finite(name: str, loaded: torch.Tensor, source: torch.Tensor | None = None) -> None:
    """Refuse a tensor that holds NaN or infinity.

    Args:
        loaded: what is going to be used.
        source: what it is a copy of, if that is of another type.

    Raises:
        WeightNotFinite: names the tensor, the first such number and its place, and how many there are.
    """
    if not loaded.is_floating_point() or is_finite(loaded):
        return
    wanted = dtype_name(loaded.dtype)
    source = loaded if source is None else source
    bad = ~source.detach().isfinite()
    count = int(bad.sum())
    if not count:
        bad = ~loaded.detach().isfinite()
    place = tuple(bad.nonzero()[0].tolist())
    value, where = source[place].item(), f"[{', '.join(map(str, place))}]"
    if not count:
        raise WeightNotFinite(f"tensor {name!r} holds {value:g} at {where}, which {wanted} has no number for")
    verb = "is" if count == 1 else "are"
    raise WeightNotFinite(
        f"tensor {name!r} holds {value} at {where}; {count:,} of its {source.numel():,} numbers {verb} not finite, and nothing "
        "can be computed with it: take another checkpoint, or write this one anew"
    )


@contextmanager
def found_in(place: str) -> Iterator[None]:
    """Say in front of what ``check_finite`` says where the tensor was found, such as ``model.path: FOLDER``."""
    try:
        yield
    except WeightNotFinite as error:
        raise WeightNotFinite(f"{place}: {error}") from error
