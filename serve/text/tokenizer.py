"""The model folder's tokenizer, read with the ``tokenizers`` library alone: the same ids as transformers' ``AutoTokenizer``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers

from serve.errors import ConfigError
from serve.text.chat import ChatTemplate, load_chat_template
from serve.text.pipeline import apply_class_pipeline, tokenizer_class

PIECE_CHARACTERS: Final = 16_384
"""A longer text is counted in pieces of this length."""

BORDER_TOKENS: Final = 256
"""Tokens that a border between two pieces may add."""


class Tokenizer:
    """Text to token ids and back, for one model.

    Nothing of it changes after construction, so threads may share it.
    """

    def __init__(self, backend: tokenizers.Tokenizer, chat: ChatTemplate | None) -> None:
        self.backend = backend
        """The ``tokenizers`` object itself; read only."""
        self.chat = chat
        """``None`` when the folder has no chat template."""
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        """Ids that ``decode`` leaves out."""
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Ids the tokenizer knows; a model may have more rows than that, never fewer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of ``text``; empty for an empty text unless special tokens are added."""
        # The batch form without offsets gives the same ids, sooner, and keeps other threads waiting least.
        return tuple(self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def exceeds(self, text: str, num_tokens: int) -> bool:
        """Whether the text has more than ``num_tokens`` tokens beyond doubt.

        The library needs about 220 bytes for each token of a text, so a long one is counted in pieces before it is tokenised
        as a whole. A word that a border cuts becomes a few tokens more; those are forgiven.
        """
        if len(text) <= PIECE_CHARACTERS or len(text.encode()) <= num_tokens:
            return False
        num_counted = -BORDER_TOKENS
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            num_counted += len(self.encode(piece, add_special_tokens=False)) - BORDER_TOKENS
            if num_counted > num_tokens:
                return True
        return False

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids, U+FFFD where bytes are no character. Ids the tokenizer does not know have no text."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text


def load_tokenizer(path: str | Path) -> Tokenizer | None:
    """Read the tokenizer of a model folder: ``tokenizer.json``, else ``vocab.json`` with ``merges.txt``.

    Returns:
        ``None`` when the folder holds no tokenizer files: the server then takes and gives token ids only.

    Raises:
        ConfigError: a file cannot be read, or the folder holds only a SentencePiece ``tokenizer.model``.
    """
    folder = Path(path)
    config = _read_json(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        backend = _from_tokenizer_json(folder / "tokenizer.json")
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = _from_vocab_and_merges(folder)
    elif (folder / "tokenizer.model").is_file():
        raise ConfigError(
            f"{folder / 'tokenizer.model'} is a SentencePiece file and there is no tokenizer.json beside it; make one with "
            "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    else:
        return None
    class_name = tokenizer_class(config, _read_json(folder / "config.json"), backend)
    apply_class_pipeline(backend, class_name, config, rebuilt=not (folder / "tokenizer.json").is_file())
    special = _special_tokens(folder, config, class_name)
    _add_tokens(backend, config, special)
    # Requests are never cut or filled up: a prompt that is too long is refused by name.
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(backend, load_chat_template(folder, config, special))


def _from_tokenizer_json(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{file} is not a tokenizer that the tokenizers library can read: {error}") from error


def _from_vocab_and_merges(folder: Path) -> tokenizers.Tokenizer:
    """Byte-level BPE as GPT-2 stores it."""
    vocab = _read_json(folder / "vocab.json")
    merges = []
    for number, line in enumerate((folder / "merges.txt").read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip() or line.startswith("#version"):
            continue
        parts = line.split()
        if len(parts) != 2:
            raise ConfigError(f"{folder / 'merges.txt'}, line {number}: expected two pieces separated by one space")
        merges.append((parts[0], parts[1]))
    try:
        model = tokenizers.models.BPE(vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix="")
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{folder / 'vocab.json'} and merges.txt do not fit together: {error}") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def _special_tokens(folder: Path, config: dict[str, Any], class_name: str) -> dict[str, str]:
    """Named special tokens, for example ``{"eos_token": "</s>"}``."""
    # Files of older versions keep the names in special_tokens_map.json; tokenizer_config.json was written last.
    merged = {**_read_json(folder / "special_tokens_map.json"), **config}
    named = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in merged.items()
        if key.endswith("_token") and not key.startswith("add_")
        if isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))
    }
    if class_name in ("GPT2Tokenizer", "GPTNeoXTokenizer", "CodeGenTokenizer"):
        # The classes' own defaults, which folders of their time leave unsaid.
        for key in ("bos_token", "eos_token", "unk_token"):
            if key not in merged:
                named[key] = "<|endoftext|>"
    return named


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], special: dict[str, str]) -> None:
    """Register tokens that only ``tokenizer_config.json`` declares, under the ids it gives them."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared: dict[str, Any] = config.get("added_tokens_decoder") or {}
    for token_id, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        if entry["content"] in known:
            continue
        known.add(entry["content"])
        flags = {key: bool(entry[key]) for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in entry}
        backend.add_tokens([tokenizers.AddedToken(entry["content"], **flags)])
        actual = backend.token_to_id(entry["content"])
        if actual != int(token_id):
            raise ConfigError(
                f"tokenizer_config.json gives {entry['content']!r} the id {token_id}; the vocabulary's next free id is {actual}"
            )
    # A named token that is an ordinary entry of the vocabulary becomes special. One that is no entry at all is left out:
    # it would get an id that the model has no row for.
    named = [token for token in special.values() if token not in known and backend.token_to_id(token) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in dict.fromkeys(named)])


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds a JSON {type(content).__name__}; an object is expected")
    return content
