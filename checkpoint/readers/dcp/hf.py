"""Reads what torch.distributed.checkpoint's ``HuggingFaceStorageWriter`` leaves before it is consolidated.

Each rank writes ordinary safetensors files of the parts it holds; the header's ``DCP_SHARDING_INFO`` says where each part
begins in its tensor. There is no table of all files. Source of the format: torch/distributed/checkpoint/_hf_utils.py, 2.10 to
2.13.
"""

from __future__ import annotations

import re
from typing import Any

from checkpoint.disk.folder import Folder, parse_object
from checkpoint.disk.step_names import step_in_names
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.layout import Extent, Piece, Stored, cover_fault
from checkpoint.readers.files.safetensors import SHARDING, index_parts
from checkpoint.readers.prefixes import chosen
from checkpoint.readers.weights import OpenFiles, Weights

NAME = "torch.distributed.checkpoint in safetensors"
LOOKS_LIKE = "shard-00001-model-00001-of-00001.safetensors"

_SHARD = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
_BELOW = "sharded"


def recognises(folder: Folder) -> bool:
    """Whether the folder has shards by the name that the writer gives them."""
    return any(_SHARD.fullmatch(name) for name in folder.names())


def newest_below(folder: Folder) -> str | None:
    """The folder that a writer which consolidates keeps the parts in."""
    if not (folder.path / _BELOW).is_dir():
        return None
    return _BELOW if recognises(folder.below(_BELOW)) else None


def open_weights(folder: Folder, given: Given = NOTHING_GIVEN) -> Weights:
    """Open every shard, and prove that the parts cover each tensor once.

    Raises:
        CheckpointError: a shard of a rank is missing, or does not say where its parts begin; the parts leave a hole or overlap.
    """
    shards = [name for name in folder.names() if _SHARD.fullmatch(name)]
    _check_ranks(shards)
    parts: dict[str, list[Piece]] = {}
    with OpenFiles(folder) as files:
        for shard in shards:
            found, metadata = index_parts(files[shard], shard)
            offsets = _offsets(shard, metadata)
            for name, extent in found.items():
                parts.setdefault(name, [])
                if 0 not in extent.shape:
                    parts[name].append(Piece(shard, extent, _start(shard, name, extent, offsets)))
        names = chosen(list(parts), given.prefix, shards[0])
        places = {name: _stored(key, parts[key], shards[0]) for name, key in names.items()}
    facts = {"ranks that wrote weights": len(shards)}
    return Weights(files.descriptors, places, shards[0], step=step_in_names(folder.path), facts=facts)


def _check_ranks(shards: list[str]) -> None:
    ranks = sorted({int(match[1]) for name in shards if (match := _SHARD.fullmatch(name))})
    missing = next((number for number, rank in enumerate(ranks, start=1) if number != rank), None)
    if missing is not None:
        raise CheckpointError(shards[-1], f"is a shard of rank {ranks[-1]}; there is none of rank {missing}")


def _offsets(shard: str, metadata: dict[str, Any]) -> dict[str, Any]:
    text = metadata.get(SHARDING)
    if not isinstance(text, str):
        raise CheckpointError(shard, f"does not say where its parts begin in their tensors: its header has no {SHARDING}")
    return parse_object(shard, text.encode())


def _start(shard: str, name: str, extent: Extent, offsets: dict[str, Any]) -> tuple[int, ...]:
    entry = offsets.get(name)
    start = entry.get("saved_offsets") if isinstance(entry, dict) else None
    ok = isinstance(start, list) and len(start) == len(extent.shape)
    if not ok or not all(type(item) is int and 0 <= item < 1 << 62 for item in start or ()):
        raise CheckpointError(
            shard, f"{SHARDING} gives tensor {name!r} of shape {list(extent.shape)} no such beginning: {start!r}"
        )
    return tuple(start or ())


def _stored(name: str, pieces: list[Piece], table: str) -> Stored:
    if not pieces:
        raise CheckpointError(table, f"tensor {name!r} has no element in any shard")
    first = pieces[0].extent
    if any((len(p.extent.shape), p.extent.dtype) != (len(first.shape), first.dtype) for p in pieces):
        raise CheckpointError(table, f"tensor {name!r} has parts of several types or numbers of dimensions")
    apart = {piece.start: piece for piece in pieces}  # ranks that hold a tensor whole may each save it
    shape = tuple(max(piece.stop[dim] for piece in apart.values()) for dim in range(len(first.shape)))
    stored = Stored(first.dtype, shape, tuple(apart.values()))
    fault = cover_fault(stored)
    if fault is not None:
        raise CheckpointError(table, f"tensor {name!r}: {fault}; is a rank's shard missing?")
    return stored
