"""A checkpoint known again by a hash, wherever it lies later; whether an adapter of Tessera lies beside the base it had."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoint.disk.content import sampled_sha256
from checkpoint.disk.manifest import load_manifest
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given, recorded_of
from checkpoint.opening.adapted import ANOTHER_BASE, given_of_base
from checkpoint.opening.prove import open_structure
from checkpoint.opening.structure import Structure
from checkpoint.readers import peft

_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "U8": "uint8"} | {
    f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)
}

_OF_NO_ANSWER = (
    *("_name_or_path", "architectures", "auto_map", "dropout", "dtype", "id2label", "initializer_range", "label2id", "output_"),
    *("pdrop", "return_dict", "token_id", "tokenizer_class", "transformers_version", "use_cache"),
)
"""Parts of the names of a configuration's keys that compute nothing, and that whoever saves a model writes anew."""
_THETA = ("rope_theta", "rotary_emb_base")

_hashed: dict[str, tuple[str, str]] = {}
"""Hashes of files by what ``stat`` says of them: a base is not read anew for each adapter that is served beside it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint is known by."""

    name: str
    """``manifest:`` or, of a folder without one, ``model:``, and 64 hexadecimal digits."""
    earlier: str | None = None
    """What releases before ``model:`` recorded of it: without what was said of how the files are read."""
    config: Mapping[str, Any] | None = None
    """What ``config.json`` says of the model, flat; ``None`` where a manifest or the weights' own files prove that."""

    def is_recorded_as(self, name: str, config: object = None) -> bool:
        """Whether this is the checkpoint of which these were recorded.

        A configuration that was saved anew is the same: what both say must agree.
        """
        if name not in (self.name, self.earlier):
            return False
        was, now = config if isinstance(config, Mapping) else {}, self.config or {}
        return all(was[key] == now[key] for key in was.keys() & now.keys())


def identity_of(structure: Structure) -> Identity:
    """What a checkpoint is known by wherever it lies.

    The manifest holds the hash of every file. Without one, the names, types, shapes and files of the tensors stand for them,
    with the size and samples of each file, and what was said of how they are read: of an adapter and its base model those of
    both, and the adapter's description.

    Raises:
        CheckpointError: a file cannot be read.
    """
    if structure.manifest is not None:
        return Identity(f"manifest:{hashlib.sha256(structure.manifest.to_bytes()).hexdigest()}")
    return Identity(*_hashes_of(structure), _configuration(structure.read_config))


def _hashes_of(structure: Structure) -> tuple[str, str]:
    places, held = structure.weights.places, structure.weights.files
    table = sorted((name, f"torch.{_TYPES[at.dtype]}", list(at.shape), at.file) for name, at in places.items())
    files = {file: _hash_of(Path(f"/dev/fd/{fd}"), file) for file, fd in sorted(held.items())}
    described = structure.folder.path / peft.CONFIG
    if structure.base is not None and described.is_file():
        files[peft.CONFIG] = _hash_of(described, peft.CONFIG)
    said = json.dumps([table, files, _said(structure.given)], sort_keys=True)
    earlier = json.dumps([table, files])
    return f"model:{hashlib.sha256(said.encode()).hexdigest()}", f"tensors:{hashlib.sha256(earlier.encode()).hexdigest()}"


def _configuration(read: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What ``config.json`` says that computes something; of rotary positions in the same words, whichever release wrote it."""
    if read is None:
        return None
    said = {key: value for key, value in read.items() if value is not None and not any(part in key for part in _OF_NO_ANSWER)}
    table = said.pop("rope_scaling", None)
    table = said.pop("rope_parameters", table) or {}
    theta = next((said.pop(key) for key in _THETA if key in said), None)
    if isinstance(table, Mapping) and not any(isinstance(value, Mapping) for value in table.values()):
        rope = {key: value for key, value in table.items() if value is not None}
        rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
        said |= {f"rope.{key}": value for key, value in rope.items() if key != "type"}
        theta = rope.get("rope_theta", theta)
    else:
        said["rope"] = table
    return said if theta is None else said | {"rope.rope_theta": theta}


def _said(given: Given) -> dict[str, Any]:
    """What was said of how the files are read, with the content of the files that say it."""
    said = {name: value for name, value in recorded_of(given).items() if name not in ("config", "tokenizer")}
    for name, usual in (("layer_map", ""), ("adapter_config", peft.CONFIG)):
        if name in said:
            path = Path(said[name])
            said[name] = _hash_of(path / usual if path.is_dir() else path, said[name])
    return said


def check_base(structure: Structure, given: Given = NOTHING_GIVEN) -> None:
    """Refuse an adapter of Tessera beside a base that has no manifest and is not the one that it was trained beside.

    A base with a manifest was compared when the two were opened. The base's files are read, of large ones samples, once.

    Args:
        given: what the two were opened with.

    Raises:
        CheckpointError: it is another base; says which it was.
    """
    manifest = None if structure.base is None or given.any_base else load_manifest(structure.folder)
    recorded = None if manifest is None else manifest.extra.get("base")
    if structure.base is None or not isinstance(recorded, dict):
        return
    own = replace(given_of_base(structure.folder, manifest, given), base=None, adapter=None)
    with open_structure(structure.base.path, given=own) as base:
        found = _known_identity(base)
    name = str(recorded.get("identity"))
    if not found.is_recorded_as(name, recorded.get("config")):
        wanted = f"{recorded.get('folder')} ({short(name)})"
        rule = f"is not the model that {structure.folder.path} was trained beside, {wanted}"
        raise CheckpointError(str(structure.base.path), f"{rule}: {ANOTHER_BASE}")


def _known_identity(base: Structure) -> Identity:
    """``identity_of`` a base without reading its files again where they are as they were."""
    if base.manifest is not None:
        return identity_of(base)
    stats = [os.fstat(fd) for _, fd in sorted(base.weights.files.items())]
    table = sorted((name, at.file, at.dtype, at.shape) for name, at in base.weights.places.items())
    mark = repr((table, _said(base.given), [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in stats]))
    if mark not in _hashed:
        hashes = _hashes_of(base)
        _hashed.clear()
        _hashed[mark] = hashes
    return Identity(*_hashed[mark], _configuration(base.read_config))


def short(identity: str) -> str:
    """An identity for a message: its kind and twelve digits."""
    kind, _, digits = identity.partition(":")
    return f"{kind} {digits[:12]}"


def _hash_of(path: Path, name: str) -> str:
    try:
        return sampled_sha256(path)
    except OSError as error:
        raise CheckpointError(name, f"cannot be read: {error.strerror}") from error
