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
from checkpoint.opening.computed import difference
from checkpoint.opening.prove import open_structure
from checkpoint.opening.structure import Structure
from checkpoint.readers import peft

_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "U8": "uint8"} | {
    f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)
}

_hashed: dict[str, tuple[str, str]] = {}
"""Hashes of files by what ``stat`` says of them: a base is not read anew for each adapter that is served beside it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint is known by."""

    name: str
    """``manifest:`` or, of a folder without one, ``model:``, and 64 hexadecimal digits."""
    earlier: str | None = None
    """What releases before ``model:`` recorded of it: without what was said of how the files are read."""
    configuration: Mapping[str, Any] | None = None
    """What its configuration says, wherever that was read."""

    def difference(self, name: str, configuration: object = None) -> str:
        """In what this is another checkpoint than the one of which these were recorded; empty where it is that one.

        A configuration that was saved anew in other words is the same.
        """
        if name not in (self.name, self.earlier):
            return "its files or what is said of how they are read (model) have changed"
        if not isinstance(configuration, Mapping) or not configuration or self.configuration is None:
            return ""
        found = difference(configuration, self.configuration)
        return f"its configuration has changed: {found}" if found else ""


def identity_of(structure: Structure) -> Identity:
    """What a checkpoint is known by wherever it lies.

    The manifest holds the hash of every file. Without one, the names, types, shapes and files of the tensors stand for them,
    with the size and samples of each file, and what was said of how they are read: of an adapter and its base model those of
    both, and the adapter's description. Beside these the configuration counts, which may have been given.

    Raises:
        CheckpointError: a file cannot be read.
    """
    if structure.manifest is not None:
        digest = hashlib.sha256(structure.manifest.to_bytes()).hexdigest()
        return Identity(f"manifest:{digest}", configuration=_plain(structure.config))
    return Identity(*_hashes_of(structure), _plain(structure.config))


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


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as it is when it was written to a file and read again."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(config), default=str))
    return plain


def _said(given: Given) -> dict[str, Any]:
    """What was said of how the files are read, with the content of the files that say it."""
    said = {name: value for name, value in recorded_of(given).items() if name not in ("config", "tokenizer")}
    for name, usual in (("layer_map", ""), ("adapter_config", peft.CONFIG)):
        if name in said:
            path = Path(said[name])
            said[name] = _hash_of(path / usual if path.is_dir() else path, said[name])
    return said


def check_base(structure: Structure, given: Given = NOTHING_GIVEN) -> None:
    """Refuse an adapter of Tessera beside a base that is not the one that it was trained beside.

    The files of a base without a manifest are read, of large ones samples, once.

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
    if other := found.difference(name, recorded.get("configuration")):
        told = recorded.get("given")
        said = "".join(f", {key} {value}" for key, value in told.items()) if isinstance(told, dict) else ""
        was = f"{recorded.get('folder')} ({short(name)}{said})"
        rule = f"is not the model that {structure.folder.path} was trained beside, {was}"
        raise CheckpointError(str(structure.base.path), f"{rule}: {other}; {ANOTHER_BASE}")


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
    return Identity(*_hashed[mark], _plain(base.config))


def short(identity: str) -> str:
    """An identity for a message: its kind and twelve digits."""
    kind, _, digits = identity.partition(":")
    return f"{kind} {digits[:12]}"


def _hash_of(path: Path, name: str) -> str:
    try:
        return sampled_sha256(path)
    except OSError as error:
        raise CheckpointError(name, f"cannot be read: {error.strerror}") from error
