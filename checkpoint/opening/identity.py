"""A checkpoint known again by a hash, wherever it lies later; whether an adapter of Tessera lies beside the base it had."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint.disk.content import sampled_sha256
from checkpoint.disk.manifest import load_manifest
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given, recorded_of
from checkpoint.opening.adapted import given_of_base
from checkpoint.opening.prove import open_structure
from checkpoint.opening.structure import Structure
from checkpoint.readers import peft

_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "U8": "uint8"} | {
    f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)
}

_PASSED_OVER = frozenset(
    ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "tokenizer_class")
)
"""Keys of a configuration that whoever saves it writes anew, and that compute nothing."""

_proved: dict[str, str] = {}
"""Identities by what ``stat`` says of the files that they are of: a base is not read anew for each adapter beside it."""


def identity_of(structure: Structure, kind: str = "model") -> str:
    """What a checkpoint is known by: ``manifest:`` or, of a folder without one, ``model:`` and 64 hexadecimal digits.

    The manifest holds the hash of every file. Without one, the names, types, shapes and files of the tensors stand for them,
    with the size and samples of each file, the configuration, and what was said of how they are read: of an adapter and its
    base model those of both, and the adapter's description.

    Args:
        kind: ``tensors`` for what releases before ``model`` recorded: without the configuration and what was said.

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
    of = [table, files] if kind == "tensors" else [table, files, _configuration(structure), _said(structure.given)]
    return f"{kind}:{hashlib.sha256(json.dumps(of, sort_keys=kind != 'tensors').encode()).hexdigest()}"


def is_known_as(structure: Structure, identity: str) -> bool:
    """Whether this is the checkpoint that was recorded, by this release or an earlier one, with that identity."""
    kind = identity.partition(":")[0]
    return identity_of(structure, kind if kind == "tensors" else "model") == identity


def _configuration(structure: Structure) -> dict[str, Any] | None:
    """What ``config.json`` says of the model, without what says nothing of its answers."""
    if structure.read_config is None:
        return None
    return {key: value for key, value in structure.read_config.items() if key not in _PASSED_OVER}


def _said(given: Given) -> dict[str, Any]:
    """What was said of how the files are read, with the content of the files that say it."""
    said = {name: value for name, value in recorded_of(given).items() if name not in ("config", "tokenizer")}
    for name, usual in (("layer_map", ""), ("adapter_config", peft.CONFIG)):
        if name in said:
            path = Path(said[name])
            said[name] = _hash_of(path / usual if path.is_dir() else path, said[name])
    return said


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
    identity = str(recorded.get("identity"))
    own = replace(given_of_base(structure.folder, manifest, given), base=None, adapter=None)
    with open_structure(structure.base.path, given=own) as base:
        stats = [os.fstat(fd) for _, fd in sorted(base.weights.files.items())]
        mark = f"{base.folder.path} {own} {[(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in stats]}"
        is_own = _proved.get(mark) == identity or is_known_as(base, identity)
    if not is_own:
        wanted = f"{recorded.get('folder')} ({short(identity)})"
        rule = f"is not the model that {structure.folder.path} was trained beside, {wanted}"
        remedy = "name that one, or join them with `tessera-finetune merge --base-changed accept`"
        raise CheckpointError(str(structure.base.path), f"{rule}: {remedy}")
    _proved.clear()
    _proved[mark] = identity


def short(identity: str) -> str:
    """An identity for a message: its kind and twelve digits."""
    kind, _, digits = identity.partition(":")
    return f"{kind} {digits[:12]}"


def _hash_of(path: Path, name: str) -> str:
    try:
        return sampled_sha256(path)
    except OSError as error:
        raise CheckpointError(name, f"cannot be read: {error.strerror}") from error
