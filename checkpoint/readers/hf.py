"""Recognises the weights of a Hugging Face folder: one file, or shards with an index; safetensors, or torch archives."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from checkpoint.disk.folder import Folder
from checkpoint.disk.step_names import step_in_name
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.layout import Extent, whole
from checkpoint.model.names import is_harmless_buffer
from checkpoint.readers.files.safetensors import index_safetensors
from checkpoint.readers.files.torch_zip import index_torch_zip
from checkpoint.readers.weights import Weights, keep_room

NAME = "Hugging Face"
LOOKS_LIKE = "config.json and model.safetensors, pytorch_model.bin or an index of shards"


_NAMED_AT_MOST = 12


@dataclass(frozen=True, slots=True)
class _Kind:
    """One way of naming weights files."""

    singles: tuple[str, ...]
    """Names of a whole model in one file, first choice first."""
    index: str
    shard: re.Pattern[str]
    """Full names of shards, whether the index lists them or not."""
    suffixes: tuple[str, ...]
    read: Callable[[int, str], dict[str, Extent]]


_KINDS = (
    _Kind(
        ("model.safetensors",),
        "model.safetensors.index.json",
        re.compile(r"model-\d+-of-\d+\.safetensors"),
        (".safetensors",),
        index_safetensors,
    ),
    _Kind(
        ("pytorch_model.bin", "pytorch_model.pt", "model.pt"),
        "pytorch_model.bin.index.json",
        re.compile(r"(?:pytorch_)?model-\d+-of-\d+\.(bin|pt)"),
        (".bin", ".pt"),
        index_torch_zip,
    ),
    # What Accelerate saves of a model that FSDP gathered, alone where nothing else of it is.
    _Kind(("pytorch_model_fsdp.bin",), "", re.compile(r"(?!)"), (".bin",), index_torch_zip),
)
"""In order of preference: where a folder has both, safetensors is read and the torch archives are left alone."""


def recognises(folder: Folder) -> bool:
    """Whether the folder has weights under a name that Hugging Face's libraries give them."""
    return any(
        kind.index == name or name in kind.singles or kind.shard.fullmatch(name) for name in folder.names() for kind in _KINDS
    )


def newest_below(_: Folder) -> str | None:
    """``None``: a folder of several models has no newest; ``recognise`` knows the numbers that trainers give."""
    return None


def open_weights(folder: Folder, _: Given = NOTHING_GIVEN) -> Weights:
    """Open every weights file of the folder and prove that index and files agree.

    Raises:
        CheckpointError: no weights; a shard missing, cut short, not in the index, or holding other tensors than the index says.
    """
    names = folder.names()
    for kind in _KINDS:
        singles = [name for name in kind.singles if name in names]
        shards = [name for name in names if kind.shard.fullmatch(name)]
        if not singles and not shards and kind.index not in names:
            continue
        if len(singles) > 1:
            raise CheckpointError(singles[1], f"stands beside {singles[0]}; which of them is the model cannot be told")
        if singles and (shards or kind.index in names):
            raise CheckpointError(singles[0], f"stands beside {(shards or [kind.index])[0]}; which is the model cannot be told")
        if singles:
            return _open_single(folder, kind, singles[0])
        if kind.index not in names:
            raise CheckpointError(kind.index, f"is missing, though there is the shard {shards[0]}")
        return _open_shards(folder, kind, shards)
    listed = ", ".join(names[:_NAMED_AT_MOST]) + (" and more" if len(names) > _NAMED_AT_MOST else "")
    raise CheckpointError(
        "model.safetensors", f"is missing, and so is any other weights file that is known; {folder.path} holds {listed}"
    )


def _open_single(folder: Folder, kind: _Kind, name: str) -> Weights:
    weights = Weights({name: folder.open(name)}, {}, name, step=step_in_name(folder.path))
    try:
        for tensor, extent in kind.read(weights.files[name], name).items():
            weights.places[tensor] = whole(name, extent)
    except BaseException:
        weights.close()
        raise
    return weights


def _open_shards(folder: Folder, kind: _Kind, shards: list[str]) -> Weights:
    weight_map = _weight_map(folder, kind)
    listed = sorted(set(weight_map.values()))
    for name in shards:
        if name not in listed:
            raise CheckpointError(name, f"is a shard that {kind.index} does not list")
    weights = Weights({}, {}, kind.index, step=step_in_name(folder.path))
    read = partial(index_safetensors, listed=True) if kind.read is index_safetensors else kind.read
    try:
        for name in listed:
            weights.files[name] = folder.open(name)
            keep_room(weights.files[name])
            found = read(weights.files[name], name)
            _check_shard(kind.index, name, weight_map, found)
            weights.places.update((tensor, whole(name, extent)) for tensor, extent in found.items())
    except BaseException:
        weights.close()
        raise
    return weights


def _weight_map(folder: Folder, kind: _Kind) -> dict[str, str]:
    weight_map = folder.read_object(kind.index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(kind.index, "must have a weight_map from tensor names to files")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(kind.suffixes):
            raise CheckpointError(
                kind.index, f"puts tensor {tensor!r} in {name!r}; it must be a {' or '.join(kind.suffixes)} file"
            )
    return weight_map


def _check_shard(index: str, name: str, weight_map: dict[str, str], found: dict[str, Extent]) -> None:
    """A shard holds the tensors that the index puts there, and no others; tables that models compute it may lack."""
    for tensor, file in weight_map.items():
        if file == name and tensor not in found and not is_harmless_buffer(tensor):
            raise CheckpointError(name, f"does not hold tensor {tensor!r}, which {index} puts there; are shards swapped?")
    for tensor in found:
        if weight_map.get(tensor) != name:
            there = f"puts in {weight_map[tensor]}" if tensor in weight_map else "does not list"
            raise CheckpointError(name, f"holds tensor {tensor!r}, which {index} {there}")
