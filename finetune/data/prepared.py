"""What ``prepare`` leaves for the ranks: where the rows are, and what is in them. A plain value, also as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

TOKENIZERS: Final = "tokenizers"
"""Below ``data.folder``, as are the two that follow: tokenizers, a folder each."""
TOKENS: Final = "tokens"
"""The shards of each source."""
LAYOUTS: Final = "layouts"
"""Which documents train, which evaluate, and how they share rows."""

TOKENIZER_CLASS: Final = "tokenizer.class"
"""Among the settings of a save: the class that the model's type demands of its tokenizer, empty for none. Releases that did not
heed it leave it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Rows ready to train on; ``finetune.data.rows.open_rows`` opens them."""

    folder: str
    """Holds the layout; see ``finetune.data.layout``."""
    tokenizer: str
    """Folder of the tokenizer, with the chat template of the run."""
    shards: tuple[str, ...]
    """Folders of the tokens, in the order the layout counts them."""
    num_train_shards: int
    """How many of them, from the first on, are of the training sources."""
    dtype: str
    fingerprint: str
    """A hash of what the rows depend on: files, formats, tokenizer, template, split, packing. A resumed run needs the same."""
    num_ids: int
    end_of_text_id: int
    stop_ids: tuple[int, ...]
    """Special tokens that end the model's turns, where they are not the end-of-text token."""
    packing: str
    """``join``, ``isolate`` or ``none``: decided."""
    seq_len: int
    train_tokens: int
    train_rows: int
    eval_tokens: int
    eval_rows: int
    documents: int
    """Documents of the training sources, before the split and weights."""
    tokens: int
    """Tokens of these documents."""
    targets: int
    """Tokens that are targets."""
    dropped: int
    """Samples left out because they were too long."""
    text_bytes: int
    known_as: tuple[str, ...] = ()
    """Other fingerprints that a resumed run may have been saved with: of the same tokens, or of data that were allowed to
    change."""
    of_model: bool = True
    """Whether the tokenizer has the class that the model's checkpoints are read with; runs of earlier releases may not."""
    left_out: int = 0
    """Records that could not be used and were skipped, of all sources; listed in ``left-out.jsonl`` of ``folder``."""

    @property
    def tokenizer_folder(self) -> Path:
        return Path(self.tokenizer)

    @property
    def train_shards(self) -> tuple[str, ...]:
        return self.shards[: self.num_train_shards]


def described(prepared: Prepared) -> str:
    """The data of a run in a few words, for its introduction."""
    how = {"join": "joined", "isolate": "packed, each sample by itself", "none": "one sample a row"}[prepared.packing]
    share = prepared.targets / max(1, prepared.tokens)
    targets = "" if prepared.targets == prepared.tokens else f", {share:.0%} of them targets (tessera-finetune data show)"
    return f"{prepared.train_tokens:,} tokens {how}{targets}"
