"""A checkpoint known again by a hash, wherever it lies later; whether an adapter of Tessera lies beside the base it had."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

from checkpoint.disk.content import sampled_sha256
from checkpoint.disk.manifest import load_manifest
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.opening.prove import open_structure
from checkpoint.opening.structure import Structure
from checkpoint.readers import peft

_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "U8": "uint8"} | {
    f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)
}

_proved: dict[str, str] = {}
"""Identities by what ``stat`` says of the files that they are of: a base is not read anew for each adapter beside it."""


def identity_of(structure: Structure) -> str:
    """What a checkpoint is known by: ``manifest:`` or, of a folder without one, ``tensors:`` and 64 hexadecimal digits.

    The manifest holds the hash of every file. Without one, the names, types, shapes and files of the tensors stand for them,
    with the size and samples of each file: of an adapter and its base model those of both, and the adapter's description.

    Raises:
        CheckpointError: a file cannot be read.
    """
    if structure.manifest is not None:
        return f"manifest:{hashlib.sha256(structure.manifest.to_bytes()).hexdigest()}"
    places, held = structure.weights.places, structure.weights.files
    table = sorted((name, f"torch.{_TYPES[at.dtype]}", list(at.shape), at.file) for name, at in places.items())
    files = {file: _hash_of(Path(f"/dev/fd/{fd}"), file) for file, fd in sorted(held.items())}
    described = structure.folder.path / peft.CONFIG
    if structure.base is not None and described.is_file():
        files[peft.CONFIG] = _hash_of(described, peft.CONFIG)
    return f"tensors:{hashlib.sha256(json.dumps([table, files]).encode()).hexdigest()}"


def check_base(structure: Structure, given: Given = NOTHING_GIVEN) -> None:
    """Refuse an adapter of Tessera beside a base that has no manifest and other files than the one it was trained beside.

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
    own = replace(given, base=None, adapter=None)
    with open_structure(structure.base.path, given=own) as base:
        stats = [os.fstat(fd) for _, fd in sorted(base.weights.files.items())]
        mark = f"{base.folder.path} {own} {[(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in stats]}"
        found = _proved.get(mark) or identity_of(base)
    if found != recorded.get("identity"):
        wanted = f"{recorded.get('folder')} ({short(str(recorded.get('identity')))})"
        rule = f"is not the model that {structure.folder.path} was trained beside, {wanted}"
        remedy = "name that one, or join them with `tessera-finetune merge --base-changed accept`"
        raise CheckpointError(str(structure.base.path), f"{rule}: {remedy}")
    _proved.clear()
    _proved[mark] = found


def short(identity: str) -> str:
    """An identity for a message: its kind and twelve digits."""
    kind, _, digits = identity.partition(":")
    return f"{kind} {digits[:12]}"


def _hash_of(path: Path, name: str) -> str:
    try:
        return sampled_sha256(path)
    except OSError as error:
        raise CheckpointError(name, f"cannot be read: {error.strerror}") from error
