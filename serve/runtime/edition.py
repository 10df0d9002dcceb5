"""What a server serves: its options with one folder of weights, and that folder's tokenizer. A reload replaces it whole."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field

from checkpoint import CheckpointError, Hold, open_structure
from checkpoint.opening.identity import check_base
from checkpoint.text.tokenizer import Tokenizer
from serve.config import ServerConfig
from serve.errors import RankStartError
from serve.model.fit import given_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Edition:
    """One reading of the model's folder. Compared by identity: reading a folder twice gives two."""

    config: ServerConfig
    """``model.path`` is the very checkpoint that is served, also when the user named a folder of several."""
    tokenizer: Tokenizer | None
    """``None`` for a model without one: requests then carry token ids only."""
    holds: tuple[Hold, ...] = ()
    """Keep the folder, and that of an adapter's base model, from being removed by a training run until ``release``."""

    tokenizer_digest: str = ""
    """Stands for the tokenizer's files: editions with another one have another tokenizer."""
    written_seconds: float | None = None
    """When the weights were written, the newest of base and adapter, in Unix time, by their file systems."""
    lineage: object = field(default_factory=object)
    """Shared by editions that differ in nothing but the weights: what was made for one can be computed by another."""

    def after(self, earlier: Edition) -> Edition:
        """This edition as one that took only the weights' place of an earlier one."""
        return dataclasses.replace(self, lineage=earlier.lineage)

    def check_folder(self) -> bool:
        """Look whether the folder is still the one that was read, before ranks load it; a replaced one is warned of.

        Returns:
            False if it was replaced.

        Raises:
            RankStartError: it is gone, or an adapter's base model is another than it was trained beside by now.
        """
        is_same = True
        for held in self.holds:
            fate, path = held.fate(), held.path
            if fate == "gone":
                raise RankStartError(
                    f"{path}, the folder that is served, was removed or renamed, or cannot be reached, and no rank can load "
                    "it; start the server again to serve what --model holds now"
                )
            if fate == "replaced":
                _log.warning(
                    "%s was replaced by another save since it was first served; the ranks load what is there now", path
                )
                is_same = False
        self._check_base()
        return is_same

    def _check_base(self) -> None:
        model = self.config.model
        if not model.base and not model.adapter:
            return
        try:
            with open_structure(model.path, given=given_of(model)) as structure:
                check_base(structure, given_of(model))
        except CheckpointError as error:
            raise RankStartError(f"what is served has changed, and no rank can load it: {error}") from error

    def release(self) -> None:
        """No rank will load this edition again: its folder may go."""
        for held in self.holds:
            held.release()
