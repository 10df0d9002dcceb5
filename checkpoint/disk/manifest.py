"""The manifest: what a checkpoint of Tessera is, and the proof that it is whole.

``manifest.json`` is written last, in one fixed form, and carries a hash of itself: whatever changes in it is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from checkpoint.disk.folder import Folder, parse_object
from checkpoint.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_HASH_CHUNK_BYTES = 4 << 20
_DESCRIPTIONS = ("config.json", "generation_config.json", "adapter_config.json")
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file as it was written."""

    bytes: int
    sha256: str
    """64 hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as it was written."""

    dtype: str
    """Name of the data type as safetensors writes it, for example ``BF16``."""
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of ``manifest.json``."""

    step: int
    """Optimizer steps taken; 0 for a model that was not trained here."""
    files: Mapping[str, FileEntry]
    """Every file of the checkpoint but the manifest."""
    tensors: Mapping[str, TensorEntry]
    extra: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    """What the writer wanted remembered; JSON values."""
    format_version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        """The one form in which this manifest is written."""
        content = {
            "format_version": self.format_version,
            "step": self.step,
            "files": {name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in self.files.items()},
            "tensors": {name: {"dtype": t.dtype, "shape": list(t.shape), "file": t.file} for name, t in self.tensors.items()},
            "extra": dict(self.extra),
        }
        digest = hashlib.sha256(_canonical(content)).hexdigest()
        return _canonical({**content, "manifest_sha256": digest})


def _canonical(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def parse_manifest(data: bytes) -> Manifest:
    """Read a manifest and prove that it is the one that was written.

    Raises:
        CheckpointError: not this format or version, or changed after it was written.
    """
    content = parse_object(MANIFEST, data)
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(MANIFEST, f"format_version is {version!r}; this release reads {FORMAT_VERSION}")
    try:
        manifest = Manifest(
            step=content["step"],
            files={name: FileEntry(int(f["bytes"]), str(f["sha256"])) for name, f in content["files"].items()},
            tensors={n: TensorEntry(t["dtype"], tuple(t["shape"]), t["file"]) for n, t in content["tensors"].items()},
            extra=content["extra"],
        )
        unchanged = manifest.to_bytes() == data and type(manifest.step) is int and manifest.step >= 0
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(MANIFEST, f"lacks a field or has one of the wrong type: {error!r}") from error
    if not unchanged:
        raise CheckpointError(MANIFEST, "was changed after it was written: its own hash does not hold")
    return manifest


def load_manifest(folder: Folder) -> Manifest | None:
    """The folder's manifest, proved unchanged; ``None`` if it has none, as folders from elsewhere."""
    return parse_manifest(folder.read_bytes(MANIFEST)) if folder.has(MANIFEST) else None


def check_sizes(folder: Folder, manifest: Manifest) -> None:
    """Every file of the manifest is there and has its size. Costs one look at each file's entry."""
    for name, entry in manifest.files.items():
        fd = folder.open(name)
        try:
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        if size != entry.bytes:
            rule = f"has {size} bytes, {MANIFEST} says {entry.bytes}: it was cut or changed after the checkpoint was written"
            raise CheckpointError(name, rule)


def check_hashes(folder: Folder, manifest: Manifest | None, then: Callable[[str], None] | None = None) -> None:
    """Every file of the manifest, which must be there, has its sha256. Reads the whole checkpoint, a few files at a time.

    ``then`` is called with the name of each file whose hash was right, in one of several threads, while the file's bytes are
    likely in the system's memory still; what it raises is raised here.
    """
    if manifest is None:
        raise CheckpointError(MANIFEST, "is missing, so there is nothing to compare the files' sha256 with")
    entries = manifest.files

    def check(name: str) -> None:
        _check_hash(folder, manifest, name)
        if then is not None:
            then(name)

    each_file(entries, check)


def check_descriptions(folder: Folder, manifest: Manifest) -> None:
    """What describes the model or its adapter has its sha256: a few kilobytes, of which one digit makes another model.

    Raises:
        CheckpointError: such a file was changed after the checkpoint was written.
    """
    for name in _DESCRIPTIONS:
        if name in manifest.files:
            _check_hash(folder, manifest, name)


def _check_hash(folder: Folder, manifest: Manifest, name: str) -> None:
    fd = folder.open(name)
    try:
        digest, wanted = hash_file(fd, name), manifest.files[name].sha256
    finally:
        os.close(fd)
    if digest != wanted:
        raise CheckpointError(name, f"its sha256 is {digest}, {MANIFEST} says {wanted}: it was changed")


def each_file(names: Iterable[str], look: Callable[[str], None]) -> None:
    """Call ``look`` with every name, in a few threads at once, and raise what it raises first."""
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        for _ in pool.map(look, names):
            pass


def hash_file(fd: int, name: str) -> str:
    """The sha256 of an open file, in hexadecimal."""
    digest = hashlib.sha256()
    offset = 0
    try:
        while data := os.pread(fd, _HASH_CHUNK_BYTES, offset):
            digest.update(data)
            offset += len(data)
    except OSError as error:
        raise CheckpointError(name, f"reading at byte {offset} failed: {error.strerror}") from error
    return digest.hexdigest()
