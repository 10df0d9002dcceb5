"""How many token ids a checkpoint's tokenizer can produce."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from checkpoint.disk.folder import Folder
from checkpoint.errors import CheckpointError
from checkpoint.text.sentencepiece_file import read_pieces
from checkpoint.text.tiktoken_file import read_tiktoken
from checkpoint.text.tokenizer_files import ADDED_TOKENS, SENTENCE_PIECE, VOCABULARY


def tokenizer_vocab_size(folder: Folder) -> tuple[str, int] | None:
    """The file that says so, and one more than the largest id; ``None`` if the folder has no tokenizer.

    Reads ``tokenizer.json``, else ``vocab.json`` or ``tokenizer.model``, with ``added_tokens.json``.
    """
    if folder.has("tokenizer.json"):
        return "tokenizer.json", 1 + _largest("tokenizer.json", _fast_ids(folder.read_object("tokenizer.json")))
    file = next((name for name in (VOCABULARY, SENTENCE_PIECE) if folder.has(name)), None)
    if file is None:
        return None
    ids: list[object] = []
    ids += folder.read_object(file).values() if file == VOCABULARY else range(len(_pieces(folder, file)))
    if folder.has(ADDED_TOKENS):
        ids += folder.read_object(ADDED_TOKENS).values()
    return file, 1 + _largest(file, ids)


def id_of(folder: Folder, token: str) -> int | None:
    """The id of a token of the folder's tokenizer; ``None`` if there is no such token, or no tokenizer."""
    if folder.has("tokenizer.json"):
        tree = folder.read_object("tokenizer.json")
        added, model = tree.get("added_tokens"), tree.get("model")
        tokens = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
        found = next((entry.get("id") for entry in tokens if entry.get("content") == token), None)
        vocab = model.get("vocab") if isinstance(model, dict) else None
        if found is None and isinstance(vocab, dict):
            found = vocab.get(token)
    elif folder.has(VOCABULARY):
        found = folder.read_object(VOCABULARY).get(token)
    else:
        pieces = _pieces(folder, SENTENCE_PIECE) if folder.has(SENTENCE_PIECE) else []
        found = pieces.index(token) if token in pieces else None
    return found if type(found) is int and found >= 0 else None


def check_rows(tokenizer: tuple[str, int] | None, rows: int) -> None:
    """Refuse a tokenizer, as ``tokenizer_vocab_size`` describes it, with ids beyond the ``rows`` of the embedding.

    Raises:
        CheckpointError: names the tokenizer's file.
    """
    if tokenizer is not None and tokenizer[1] > rows:
        file, size = tokenizer
        raise CheckpointError(file, f"has ids up to {size - 1}; the embedding has {rows} rows, for ids up to {rows - 1}")


def _pieces(folder: Folder, file: str) -> list[str]:
    found = read_tiktoken(folder, file)
    return read_pieces(folder, file) if found is None else found


def _fast_ids(tokenizer: dict[str, Any]) -> Iterable[object]:
    """Ids of a ``tokenizer.json``: a map for most models, a list in order for unigram ones, and the added tokens."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        ids: list[object] = list(vocab.values())
    elif isinstance(vocab, list):
        ids = list(range(len(vocab)))
    else:
        raise CheckpointError("tokenizer.json", "must have model.vocab, a map or a list of tokens")
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise CheckpointError("tokenizer.json", "has added_tokens that are not a list of objects")
    return [*ids, *(token.get("id") for token in added)]


def _largest(file: str, ids: Iterable[object]) -> int:
    """The largest id; every one must be a number from 0 up."""
    largest = -1
    for item in ids:
        if type(item) is not int or item < 0:
            raise CheckpointError(file, f"has the token id {item!r}; ids are integers from 0 up")
        largest = max(largest, item)
    if largest < 0:
        raise CheckpointError(file, "has no tokens")
    return largest
