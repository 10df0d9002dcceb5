"""The model folder's tokenizer, read with the ``tokenizers`` library alone: the same ids as transformers' ``AutoTokenizer``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import tokenizers

from checkpoint.config import shown
from checkpoint.errors import CheckpointError
from checkpoint.folder import Folder, parse_object
from checkpoint.tokenizer_files import FLAGS, MAX_IDS, read_special_tokens, read_tokenizer_config
from serve.errors import ConfigError
from serve.text.chat import ChatTemplate, load_chat_template
from serve.text.pipeline import apply_class_pipeline, tokenizer_class

PIECE_CHARACTERS: Final = 16_384
"""A longer text is counted in pieces of this length."""

UNCOUNTED_BYTES: Final = 128 << 10
"""A text of at most so many bytes is tokenised without being counted first: at 220 bytes for a token, in 28 MiB at most."""

BORDER_TOKENS: Final = 256
"""Tokens that a border between two pieces may add."""

_PROBE = "Hello, world! \u00e9\u65e5 1\n"


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
        probed = (*self.encode(""), *self.encode(_PROBE))
        self.largest_id: int = max((*backend.get_vocab(with_added_tokens=True).values(), *probed), default=-1)
        """The largest id that any text can become, by the vocabulary and by what is put around every text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of ``text``; empty for an empty text unless special tokens are added."""
        # The batch form without offsets gives the same ids, sooner, and keeps other threads waiting least.
        return tuple(self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def exceeds(self, text: str, num_tokens: int) -> bool:
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
        ConfigError: a file cannot be read, breaks a rule or is a link out of the folder, or the folder holds only a
            SentencePiece ``tokenizer.model``.
    """
    folder = Folder(Path(path))
    try:
        return _load(folder)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _load(folder: Folder) -> Tokenizer | None:
    config = read_tokenizer_config(folder)
    if folder.has("tokenizer.json"):
        file = "tokenizer.json"
        data = folder.read_bytes(file)
        parse_object(file, data)  # by the rules for all files, which the library does not know
        with _reading(file):
            backend = tokenizers.Tokenizer.from_buffer(data)
    elif folder.has("vocab.json") and folder.has("merges.txt"):
        file = "vocab.json"
        backend = _from_vocab_and_merges(folder)
    elif folder.has("tokenizer.model"):
        raise CheckpointError(
            "tokenizer.model",
            "is a SentencePiece file and there is no tokenizer.json beside it; make one with "
            "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
        )
    else:
        return None
    with _reading(file):
        model_config = folder.read_object("config.json") if folder.has("config.json") else {}
        class_name = tokenizer_class(config, model_config, backend)
        apply_class_pipeline(backend, class_name, config, rebuilt=file == "vocab.json")
    special = _special_tokens(folder, config, class_name)
    with _reading("tokenizer_config.json"):
        _add_tokens(backend, config, special)
    with _reading(file):
        # Requests are never cut or filled up: a prompt that is too long is refused by name.
        backend.no_truncation()
        backend.no_padding()
        tokenizer = Tokenizer(backend, load_chat_template(folder, config, special))
        tokenizer.decode([max(0, tokenizer.largest_id)])
    return tokenizer


@contextmanager
def _reading(file: str) -> Iterator[None]:
    """Whatever the tokenizers library makes of a file's content is the file's fault."""
    try:
        yield
    except (CheckpointError, ConfigError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and its panics derive from BaseException alone
        rule = f"is not what the tokenizers library can use: {' '.join(str(error).split())[:300]}"
        raise CheckpointError(file, rule) from error


def _from_vocab_and_merges(folder: Folder) -> tokenizers.Tokenizer:
    """Byte-level BPE as GPT-2 stores it."""
    vocab = folder.read_object("vocab.json")
    for token_id in vocab.values():
        if type(token_id) is not int or not 0 <= token_id < MAX_IDS:
            raise CheckpointError("vocab.json", f"has the token id {shown(token_id)}; ids are integers from 0 up")
    merges = []
    for number, line in enumerate(folder.read_text("merges.txt").split("\n"), start=1):
        if not line.strip() or line.startswith("#version"):
            continue
        parts = line.split()
        if len(parts) != 2:
            raise CheckpointError("merges.txt", f"line {number}: expected two pieces separated by one space")
        merges.append((parts[0], parts[1]))
    with _reading("merges.txt"):
        model = tokenizers.models.BPE(vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix="")
        backend = tokenizers.Tokenizer(model)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def _special_tokens(folder: Folder, config: dict[str, Any], class_name: str) -> dict[str, str]:
    """Named special tokens, for example ``{"eos_token": "</s>"}``."""
    # Files of older versions keep the names in special_tokens_map.json; tokenizer_config.json was written last.
    merged = {**read_special_tokens(folder), **config}
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
        flags = {key: entry[key] for key in FLAGS if key in entry}
        backend.add_tokens([tokenizers.AddedToken(entry["content"], **flags)])
        actual = backend.token_to_id(entry["content"])
        if actual != int(token_id):
            rule = f"gives {shown(entry['content'])} the id {token_id}; the vocabulary's next free id is {actual}"
            raise CheckpointError("tokenizer_config.json", rule)
    # A named token that is an ordinary entry of the vocabulary becomes special. One that is no entry at all is left out:
    # it would get an id that the model has no row for.
    named = [token for token in special.values() if token not in known and backend.token_to_id(token) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in dict.fromkeys(named)])
