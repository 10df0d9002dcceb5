"""Experts that files have one by one, as the stacks of them that the models of transformers have."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final

from checkpoint.errors import CheckpointError
from checkpoint.layout import Piece, Stored

_FAMILY: Final = "mixtral"
_EXPERT: Final = re.compile(r"(.*)\.block_sparse_moe\.experts\.(\d{1,6})\.(w[123])\.weight")
_ROUTER: Final = (".block_sparse_moe.gate.", ".mlp.gate.")
_STACKS: Final[Mapping[str, tuple[str, ...]]] = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
"""Each stack [experts, rows, columns], and the tensors of an expert whose rows lie in it one after the other."""


def stacked(places: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Stored]:
    """A model's tensors with each layer's experts as transformers (5 and later) has them: nothing is read.

    Those of other families, and of files that have stacks, are given as they are.

    Raises:
        CheckpointError: an expert or a part of one is missing or of another form, or an adapter adds to single experts.
    """
    if config.get("model_type") != _FAMILY:
        return dict(places)
    kept: dict[str, Stored] = {}
    layers: dict[str, dict[tuple[int, str], Stored]] = {}
    for name, stored in places.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            kept[name.replace(*_ROUTER)] = stored
        else:
            layers.setdefault(match[1], {})[int(match[2]), match[3]] = stored
    for layer, parts in layers.items():
        count = config.get("num_local_experts", 8)
        for stack, names in _STACKS.items():
            listed = [[_part(layer, parts, expert, name) for name in names] for expert in range(count)]
            kept[f"{layer}.mlp.experts.{stack}"] = _joined(f"{layer}.mlp.experts.{stack}", listed)
        extra = next((key for key in parts if key[0] >= count), None)
        if extra is not None:
            rule = f"holds an expert {extra[0]} of {layer!r}; num_local_experts is {count}"
            raise CheckpointError(parts[extra].file, rule)
    return kept


def _part(layer: str, parts: Mapping[tuple[int, str], Stored], expert: int, name: str) -> Stored:
    stored = parts.get((expert, name))
    whole = f"{layer}.block_sparse_moe.experts.{expert}.{name}.weight"
    if stored is None:
        raise CheckpointError(next(iter(parts.values())).file, f"has no tensor {whole!r}, and others of that layer's experts")
    if stored.added is not None:
        rule = f"{whole!r} is adapted by itself, which is not trained on; write the two as one (`tessera-finetune export`)"
        raise CheckpointError(stored.file, rule)
    if stored.merge != "boxes" or stored.coded is not None or len(stored.shape) != 2:
        raise CheckpointError(stored.file, f"tensor {whole!r} is no plain matrix, and cannot be stacked")
    return stored


def _joined(name: str, experts: list[list[Stored]]) -> Stored:
    """A stack of the experts' tensors."""
    first = experts[0]
    pieces: list[Piece] = []
    for number, parts in enumerate(experts):
        begin = 0
        for part, like in zip(parts, first, strict=True):
            if (part.dtype, part.shape) != (first[0].dtype, like.shape) or part.shape[1] != first[0].shape[1]:
                rule = f"expert {number} of {name!r} is {part.dtype} {list(part.shape)}; the first is"
                raise CheckpointError(part.file, f"{rule} {like.dtype} {list(like.shape)}")
            pieces += [_lifted(piece, number, begin) for piece in part.pieces]
            begin += part.shape[0]
    rows = sum(part.shape[0] for part in first)
    return Stored(first[0].dtype, (len(experts), rows, first[0].shape[1]), tuple(pieces))


def _lifted(piece: Piece, expert: int, begin: int) -> Piece:
    """A box of an expert's tensor as one of the stack's, of which that has the rows from ``begin`` on."""
    extent = piece.extent
    shape, strides = (1, *extent.shape), (extent.shape[0] * extent.strides[0] or 1, *extent.strides)
    lifted = dataclasses.replace(extent, shape=shape, strides=strides)
    return Piece(piece.file, lifted, (expert, begin + piece.start[0], piece.start[1]))
