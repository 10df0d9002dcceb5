"""The tokenizer of the served folder, with its chat template; and how long a text may be before it is tokenised."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from checkpoint.disk.folder import Folder
from checkpoint.errors import CheckpointError
from checkpoint.text.tokenizer import Tokenizer, read_tokenizer
from checkpoint.text.tokenizer_files import TOKENIZER_FILES
from serve.errors import ConfigError

PIECE_CHARACTERS: Final = 16_384
"""A longer text is counted in pieces of this length."""

UNCOUNTED_BYTES: Final = 128 << 10
"""A text of at most so many bytes is tokenised without being counted first: at 220 bytes for a token, in 28 MiB at most."""

BORDER_TOKENS: Final = 256
"""Tokens that a border between two pieces may add."""


def load_tokenizer(path: str | Path | Folder) -> Tokenizer | None:
    """Read the tokenizer of a model folder, and compile its chat template: no request meets one that is broken.

    Returns:
        ``None`` when the folder holds no tokenizer files: the server then takes and gives token ids only.

    Raises:
        ConfigError: a file cannot be read, breaks a rule or is a link out of the folder, or the template does not compile.
    """
    try:
        tokenizer = read_tokenizer(path if isinstance(path, Folder) else Folder(Path(path)))
        if tokenizer is not None:
            _ = tokenizer.chat
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    return tokenizer


def exceeds(tokenizer: Tokenizer, text: str, num_tokens: int) -> bool:
    """Whether the text has more than ``num_tokens`` tokens beyond doubt.

    The library needs about 220 bytes for each token of a text, so a long one is counted in pieces before it is tokenised
    as a whole; a short one is not, for counting takes longer than tokenising. A word that a border cuts becomes a few
    tokens more; those are forgiven.
    """
    if len(text.encode()) <= max(UNCOUNTED_BYTES, num_tokens):
        return False
    num_counted = -BORDER_TOKENS
    for start in range(0, len(text), PIECE_CHARACTERS):
        piece = text[start : start + PIECE_CHARACTERS]
        num_counted += len(tokenizer.encode(piece, add_special_tokens=False)) - BORDER_TOKENS
        if num_counted > num_tokens:
            return True
    return False


def tokenizer_digest(folder: Folder) -> str:
    """Stands for the content of a folder's tokenizer files: equal ones make the same tokenizer."""
    digest = hashlib.sha256()
    for name in sorted(TOKENIZER_FILES):
        if folder.has(name):
            data = folder.read_bytes(name)
            digest.update(f"{name} {len(data)} ".encode())
            digest.update(data)
    return digest.hexdigest()
