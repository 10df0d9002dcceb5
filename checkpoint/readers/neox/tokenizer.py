"""The tokenizer of a GPT-NeoX run: which kind it is, where its files are, and how many rows of the embedding it fills."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from checkpoint.disk.folder import Folder, Written
from checkpoint.given import Given
from checkpoint.readers.neox.settings import Settings
from checkpoint.readers.surroundings import find_tokenizer
from checkpoint.text.sentencepiece_file import read_unknown
from checkpoint.text.tokenizer_files import (
    MERGES,
    SENTENCE_PIECE,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    VOCABULARY,
)
from checkpoint.text.vocabulary import id_of, tokenizer_vocab_size

_END_OF_TEXT: Final = "<|endoftext|>"
_PADDING: Final = "<|padding|>"
_CONVERTED: Final = "tokenizer"
"""The folder beside the checkpoint's that GPT-NeoX's converter of Llama writes the tokenizer to."""
_CHARACTERS, _SENTENCE_PIECE, _FOLDER = "charleveltokenizer", "spmtokenizer", "hfgpt2tokenizer"
_CHARACTER_IDS: Final = 512
"""Ids that GPT-NeoX counts for its tokenizer of characters; bytes have the first 256."""

_FILES: Final[Mapping[str, Mapping[str, str]]] = {
    "hftokenizer": {TOKENIZER_JSON: "vocab_file"},
    "gpt2bpetokenizer": {VOCABULARY: "vocab_file", MERGES: "merge_file"},
    _SENTENCE_PIECE: {SENTENCE_PIECE: "vocab_file"},
}
"""By kind, the settings that name its files, by the names that a folder of transformers has for them."""


def tokenizer_of(folder: Folder, given: Given, settings: Settings | None) -> Folder:
    """The folder with the files of the checkpoint's tokenizer; ``folder`` itself where there are none.

    Of the paths in the settings only the last part is looked for, beside the weights and above: they are of another machine.

    Raises:
        CheckpointError: the one that was given is not there, or is no file of a tokenizer.
    """
    kind = "" if settings is None else settings.text("tokenizer_type")
    keys = _FILES.get(kind, {})
    names = {name: _last_part(settings, key) for name, key in keys.items()}
    inside = _last_part(settings, "vocab_file") if kind == _FOLDER else _CONVERTED
    found = find_tokenizer(folder, given, above=True, named=names if all(names.values()) else {}, inside=inside)
    if given.tokenizer is not None:
        return found
    if kind == _CHARACTERS:
        return _characters(folder)
    return found


def rows_with_tokens(settings: Settings | None, tokenizer: Folder, rows: int, num_ranks: int) -> int:
    """Rows that have a token, where ``rows`` are those of the tokenizer filled up to a multiple; else all of them.

    Raises:
        CheckpointError: the tokenizer's file cannot be read.
    """
    found = tokenizer_vocab_size(tokenizer)
    if settings is None or found is None:
        return rows
    count = _CHARACTER_IDS if isinstance(tokenizer, Written) else found[1]
    is_padded = settings.text("tokenizer_type") == _FOLDER and id_of(tokenizer, _PADDING) is None
    trained = count + is_padded  # its trainer gives such a tokenizer that token
    multiple = settings.count("make_vocab_size_divisible_by", 128) * num_ranks
    return count if -(-trained // multiple) * multiple == rows else rows


def end_of_document(settings: Settings, tokenizer: Folder) -> int | None:
    """The id that its trainer puts behind each document; ``None`` where there is no tokenizer, or it has none.

    Raises:
        CheckpointError: the tokenizer's file cannot be read.
    """
    end = id_of(tokenizer, _END_OF_TEXT)
    if end is None and settings.text("tokenizer_type") == _SENTENCE_PIECE and tokenizer.has(SENTENCE_PIECE):
        return read_unknown(tokenizer, SENTENCE_PIECE)  # what sentencepiece gives for a piece that it does not have
    return end


def _last_part(settings: Settings | None, key: str) -> str:
    path = None if settings is None else settings.values.get(key)
    name = path.rstrip("/").rsplit("/", 1)[-1] if isinstance(path, str) else ""
    return "" if name in (".", "..") or "\\" in name or "\0" in name else name


def _characters(folder: Folder) -> Folder:
    """A token for each byte of UTF-8, whose id it is; byte 0 ends a document, and in a text is written as other ends are."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))  # the letters that byte-level vocabularies have for the bytes that do not print
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    vocab = {letter: byte for byte, letter in enumerate(letters)} | {_END_OF_TEXT: 0}
    del vocab[letters[0]]
    by_byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": True}
    tree = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": _END_OF_TEXT, **flags}],
        "normalizer": {"type": "Replace", "pattern": {"String": "\0"}, "content": _END_OF_TEXT},
        "pre_tokenizer": by_byte,
        "decoder": by_byte,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END_OF_TEXT}
    files = {TOKENIZER_JSON: tree, TOKENIZER_CONFIG: config}
    return Written(folder.path, {name: json.dumps(content).encode() for name, content in files.items()})
