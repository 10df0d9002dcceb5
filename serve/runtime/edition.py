"""What a server serves: its options with one folder of weights, and that folder's tokenizer. A reload replaces it whole."""

from __future__ import annotations

from dataclasses import dataclass

from serve.config import ServerConfig
from serve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Edition:
    """One reading of the model's folder. Compared by identity: reading a folder twice gives two."""

    config: ServerConfig
    """``model.path`` is the very checkpoint that is served, also when the user named a folder of several."""
    tokenizer: Tokenizer | None
    """``None`` for a model without one: requests then carry token ids only."""
