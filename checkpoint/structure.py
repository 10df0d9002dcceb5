"""Recognises what lies in a checkpoint's folder and refuses what cannot be trusted, by headers and configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from checkpoint.config import (
    CONFIG,
    GENERATION,
    check_config,
    check_generation_config,
    check_vocabulary,
    layers,
    normalized,
    with_one_beginning,
)
from checkpoint.errors import CheckpointError
from checkpoint.folder import Folder
from checkpoint.latest import is_root, resolve_latest
from checkpoint.layout import Extent
from checkpoint.manifest import MANIFEST, Manifest, check_hashes, check_sizes, load_manifest
from checkpoint.readers.hf import Weights, open_weights

Verification = Literal["structure", "sha256"]


@dataclass(frozen=True, slots=True)
class Structure:
    """A checkpoint whose files were found sound, before any tensor is read. Owns the weights files' descriptors."""

    folder: Folder
    config: dict[str, Any]
    generation_config: dict[str, Any]
    manifest: Manifest | None
    """``None`` for folders that Tessera did not write."""
    weights: Weights

    def check_model(self) -> None:
        """Refuse a ``config.json`` of which no model shall be made: before one is built.

        Raises:
            CheckpointError: it has more layers than there are tensors, so that building it could take minutes; or a token id
                that no row of the vocabulary belongs to.
        """
        count, held = layers(self.config), len(self.weights.places)
        if count is not None and count > held:
            raise CheckpointError(CONFIG, f"gives the model {count} layers; {self.weights.table} has {held} tensors in all")
        check_vocabulary(self.config, self.generation_config)

    def close(self) -> None:
        """Give the files back."""
        self.weights.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_structure(path: str | Path, *, verify: Verification = "structure") -> Structure:
    """Prove a checkpoint sound, all but the match of its tensors with the model of ``config.json``, which takes that model.

    Args:
        path, verify: as for ``open_checkpoint``.

    Raises:
        CheckpointError: a file is missing, broken or not to be trusted; it names the file and the rule.
    """
    if verify not in ("structure", "sha256"):
        raise ValueError(f"verify is {verify!r}; it must be 'structure' or 'sha256'")
    folder = open_folder(path)
    identity = folder.identity()
    manifest = load_manifest(folder)
    if manifest is not None:
        check_sizes(folder, manifest)
    if verify == "sha256":
        check_hashes(folder, manifest)
    config, generation = read_configs(folder)
    weights = open_weights(folder)
    try:
        if manifest is not None:
            _check_table(manifest, weights.places)
        if folder.identity() != identity:
            raise CheckpointError(str(path), "was replaced by another save while it was being opened; open it again")
    except CheckpointError:
        weights.close()
        raise
    return Structure(folder, config, generation, manifest, weights)


def open_folder(path: str | Path) -> Folder:
    """The checkpoint's folder: ``path`` itself, or the latest whole step under it.

    Raises:
        CheckpointError: there is none, or it is a LoRA adapter's.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(str(path), "is not a folder" if path.exists() else "there is no such folder")
    folder = Folder(resolve_latest(path) if is_root(path) else path)
    if folder.has("adapter_config.json") and not folder.has(CONFIG):
        rule = "this folder is a LoRA adapter, not a model; `tessera-finetune merge` joins it with its base model"
        raise CheckpointError("adapter_config.json", rule)
    return folder


def read_configs(folder: Folder) -> tuple[dict[str, Any], dict[str, Any]]:
    """``config.json`` and ``generation_config.json``, checked; the second is empty if there is none.

    Raises:
        CheckpointError: one of them cannot be read or breaks a rule.
    """
    config = folder.read_object(CONFIG)
    check_config(config)
    generation = folder.read_object(GENERATION) if folder.has(GENERATION) else {}
    check_generation_config(generation)
    return normalized(config), with_one_beginning(generation)


def _check_table(manifest: Manifest, places: Mapping[str, tuple[str, Extent]]) -> None:
    """The manifest's tensors are those of the files."""
    for name, (file, extent) in places.items():
        entry = manifest.tensors.get(name)
        if entry is None or file not in manifest.files:
            raise CheckpointError(file, f"holds tensor {name!r}, which {MANIFEST} does not list")
        if (entry.dtype, entry.shape, entry.file) != (extent.dtype, extent.shape, file):
            raise CheckpointError(file, f"tensor {name!r} has another dtype, shape or file than {MANIFEST} says")
    for name, entry in manifest.tensors.items():
        if name not in places:
            raise CheckpointError(entry.file, f"does not hold tensor {name!r}, which {MANIFEST} lists")
