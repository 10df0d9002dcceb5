"""A checkpoint whose files were found sound: where everything of it is, and the open files of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from checkpoint.disk.folder import Folder
from checkpoint.disk.manifest import Manifest
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.model.config import CONFIG, check_vocabulary, layers
from checkpoint.readers.weights import Weights

Verification = Literal["structure", "sha256"]

CODE = "code in the folder"
"""Among the facts of weights whose configuration names code: that there is some, and that it is left alone."""


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
    base: Folder | None = None
    """The base model's folder, of an adapter that is joined with one."""
    given: Given = NOTHING_GIVEN
    """What was said of the model's own files: of an adapter's base, of those."""

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
        """Close the weights files."""
        self.weights.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
