"""Recognises what lies in a checkpoint's folder and refuses what cannot be trusted, by headers and configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from checkpoint.config import CONFIG, check_vocabulary, layers
from checkpoint.errors import CheckpointError
from checkpoint.folder import Folder
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.layout import Stored
from checkpoint.manifest import MANIFEST, Manifest, check_hashes, check_sizes, load_manifest
from checkpoint.readers import hf
from checkpoint.readers.weights import Weights
from checkpoint.recognise import recognise
from checkpoint.surroundings import checked_configs, find_configs, find_tokenizer

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
    layout: str
    """What the layout of the weights' files is called."""
    tokenizer: Folder
    """Where the tokenizer's files are, if there are any."""

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


def open_structure(path: str | Path, *, verify: Verification = "structure", given: Given = NOTHING_GIVEN) -> Structure:
    """Prove a checkpoint sound, all but the match of its tensors with the model of ``config.json``, which takes that model.

    Args:
        path, verify, given: as for ``open_checkpoint``.

    Raises:
        CheckpointError: a file is missing, broken or not to be trusted; it names the file and the rule.
    """
    if verify not in ("structure", "sha256"):
        raise ValueError(f"verify is {verify!r}; it must be 'structure' or 'sha256'")
    folder, layout = recognise(path)
    above = layout is not hf
    identity = folder.identity()
    manifest = load_manifest(folder)
    if manifest is not None:
        check_sizes(folder, manifest)
    if verify == "sha256":
        check_hashes(folder, manifest)
    configs = find_configs(folder, given, above=above)
    tokenizer = find_tokenizer(folder, given, above=above)
    weights = layout.open_weights(folder, given)
    try:
        config, generation = configs or checked_configs(folder, weights.config, weights.table, above=above)
        if manifest is not None:
            _check_table(manifest, weights.places)
        if folder.identity() != identity:
            raise CheckpointError(str(path), "was replaced by another save while it was being opened; open it again")
    except BaseException:
        weights.close()
        raise
    return Structure(folder, config, generation, manifest, weights, layout.NAME, weights.tokenizer or tokenizer)


def model_config(path: str | Path, given: Given = NOTHING_GIVEN) -> tuple[dict[str, Any], Path]:
    """The checked ``config.json`` of a checkpoint whose weights need not be there, and the checkpoint's folder.

    Raises:
        CheckpointError: there is none, or it breaks a rule.
    """
    path = Path(path)
    if (path / CONFIG).is_file() and given.config is None:
        folder, layout = Folder(path), None
    else:
        folder, layout = recognise(path)
    configs = find_configs(folder, given, above=layout is not None and layout is not hf)
    if configs is not None:
        return configs[0], folder.path
    with open_structure(folder.path, given=given) as structure:
        return structure.config, folder.path


def tokenizer_place(path: str | Path, given: Given = NOTHING_GIVEN) -> Path:
    """The folder whose tokenizer belongs to a checkpoint, whose weights need not be there.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    if (Path(path) / CONFIG).is_file() and given.tokenizer is None:
        return Path(path)
    folder, layout = recognise(path)
    return find_tokenizer(folder, given, above=layout is not hf).path


def _check_table(manifest: Manifest, places: Mapping[str, Stored]) -> None:
    """The manifest's tensors are those of the files."""
    for name, stored in places.items():
        file = stored.file
        entry = manifest.tensors.get(name)
        if entry is None or file not in manifest.files:
            raise CheckpointError(file, f"holds tensor {name!r}, which {MANIFEST} does not list")
        if (entry.dtype, entry.shape, entry.file) != (stored.dtype, stored.shape, file):
            raise CheckpointError(file, f"tensor {name!r} has another dtype, shape or file than {MANIFEST} says")
    for name, entry in manifest.tensors.items():
        if name not in places:
            raise CheckpointError(entry.file, f"does not hold tensor {name!r}, which {MANIFEST} lists")
