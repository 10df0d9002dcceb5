"""Compares the tensors a checkpoint stores with those its configuration calls for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from checkpoint.errors import CheckpointError
from checkpoint.layout import TensorInfo
from checkpoint.model.names import all_stored, find_tied, is_harmless_buffer
from checkpoint.readers.weights import Weights

_COMPARE_BYTES = 16 << 20
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
_NAMED_AT_MOST = 4
"""How many of many missing tensors a message names."""


class _Readable(Protocol):
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor: ...


def check_tensors(
    checkpoint: _Readable, expected: Mapping[str, tuple[int, ...]], tied: Mapping[str, str], weights: Weights
) -> None:
    """Refuse weights that are not those of the model that ``config.json`` describes.

    Args:
        checkpoint: whose weights they are; read where tied tensors are stored twice, to compare them.
        expected: every tensor the model has, by the model's names, and its whole shape as stored.
        tied: alias to owner. One of them may be absent.
        weights: where the checkpoint's tensors lie.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of another shape, or not floating point, or tied ones differ.
    """
    tensors = checkpoint.tensors
    missing = [name for name in expected if find_tied(name, tensors, tied) is None]
    if missing and any(_ONE_EXPERT.search(name) for name in tensors):
        rule = "stores experts one by one; such a model is served and exported, and neither trained nor evaluated here"
        raise CheckpointError(weights.table, rule)
    if missing:
        more = f" and {len(missing) - _NAMED_AT_MOST} more" if len(missing) > _NAMED_AT_MOST else ""
        listed = ", ".join(repr(name) for name in missing[:_NAMED_AT_MOST])
        raise CheckpointError(weights.table, f"has no tensor {listed}{more}, which the model of config.json has")
    used: set[str] = set()
    for name, shape in expected.items():
        copies = all_stored(name, tensors, tied)
        for stored in copies:
            if stored not in used:
                _check_one(tensors[stored], tuple(shape))
        if not used.issuperset(copies):
            # torch.save stores what is tied once, under two names: then there is nothing to compare.
            apart = {weights.places[stored]: stored for stored in reversed(copies)}
            _check_equal(checkpoint, list(reversed(apart.values())))
        used.update(copies)
    for name, info in tensors.items():
        if name not in used and not is_harmless_buffer(name):
            raise CheckpointError(info.file, f"holds tensor {name!r}, which the model of config.json does not have")


def _check_one(info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        rule = f"tensor {info.name!r} has shape {list(info.shape)}; the model of config.json makes it {list(shape)}"
        raise CheckpointError(info.file, rule)
    if not info.dtype.is_floating_point:
        raise CheckpointError(info.file, f"tensor {info.name!r} holds {info.dtype}; weights must be floating point")


def _check_equal(checkpoint: _Readable, copies: list[str]) -> None:
    """Tied tensors that are all stored must be one and the same: otherwise some of them would be ignored without a word."""
    first, *others = (checkpoint.tensors[name] for name in copies)
    for other in others:
        for part in _parts(first):
            if not _same(checkpoint.read(first.name, part).to(other.dtype), checkpoint.read(other.name, part)):
                rule = f"ties {first.name!r} and {other.name!r}; both are stored, and they differ (tie_word_embeddings?)"
                raise CheckpointError("config.json", rule)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    # NaN in the same places is no difference: who looks for it names the tensor.
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _parts(info: TensorInfo) -> Iterator[tuple[slice, ...]]:
    """Slices of bounded size that together are the tensor."""
    if not info.shape:
        yield ()
        return
    row_bytes = info.dtype.itemsize
    for size in info.shape[1:]:
        row_bytes *= size
    rows = max(1, _COMPARE_BYTES // row_bytes)
    for start in range(0, info.shape[0], rows):
        yield (slice(start, start + rows),)
