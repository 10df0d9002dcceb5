"""A checkpoint's tokenizer, read with the ``tokenizers`` library alone: the same ids as transformers' ``AutoTokenizer``.

Training and serving both read it here, so a model is asked with the ids it was taught with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import tokenizers

from checkpoint.disk.folder import Folder, parse_object
from checkpoint.errors import CheckpointError, shown
from checkpoint.text.sentencepiece import is_plain_bpe, open_sentencepiece
from checkpoint.text.tiktoken import open_tiktoken
from checkpoint.text.tiktoken_file import NAMED, read_tiktoken
from checkpoint.text.tokenizer_class import apply_class_pipeline, tokenizer_class
from checkpoint.text.tokenizer_files import (
    ADDED_TOKENS,
    FLAGS,
    MAX_IDS,
    SENTENCE_PIECE,
    TOKENIZER_JSON,
    default_template,
    read_added_tokens,
    read_special_tokens,
    read_tokenizer_config,
)

if TYPE_CHECKING:
    from checkpoint.text.chat import ChatTemplate

END_OF_TEXT: Final = "<|endoftext|>"
_ENDS: Final = (END_OF_TEXT, "</s>")
"""What ends a text where the files name no ``eos_token`` of the vocabulary; the first that is in it."""

_PROBE = "Hello, world! \u00e9\u65e5 1\n"


class Tokenizer:
    """Text to token ids and back, for one model.

    Nothing of it changes after construction, so threads may share it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        template: tuple[str, str] | None = None,
    ) -> None:
        """
        Args:
            special_tokens: the named ones, for example ``{"eos_token": "</s>"}``.
            template: the chat template and the file it is in.
        """
        self.backend = backend
        """The ``tokenizers`` object itself; read only."""
        self.template = template
        """The folder's chat template as it is written, and the file it is in; ``None`` when there is none."""
        special = {token_id: token for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(special)
        """Ids that ``decode`` leaves out."""
        self.special_texts = tuple(token.content for token in special.values() if token.content)
        """How those are written in a text."""
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Ids the tokenizer knows; a model may have more rows than that, never fewer."""
        probed = (*self.encode(""), *self.encode(_PROBE))
        self.largest_id: int = max((*backend.get_vocab(with_added_tokens=True).values(), *probed), default=-1)
        """The largest id that any text can become, by the vocabulary and by what is put around every text."""
        self.special_tokens = dict(special_tokens or {})
        """The named special tokens, as templates see them."""
        ends = [token for token in (self.special_tokens.get("eos_token"), *_ENDS) if token is not None]
        end = next((token for token in ends if backend.token_to_id(token) is not None), None)
        self.end_of_text_id: int | None = None if end is None else backend.token_to_id(end)
        """Id of the token that ends a text; ``None`` if the vocabulary has none that is known for it."""
        if end is not None:
            self.special_tokens.setdefault("eos_token", end)

    @cached_property
    def chat(self) -> ChatTemplate | None:
        """The folder's chat template, compiled when it is first asked for; ``None`` when there is none.

        Raises:
            CheckpointError: it does not compile.
        """
        from checkpoint.text.chat import ChatTemplate

        return None if self.template is None else ChatTemplate(self.template[0], self.special_tokens, file=self.template[1])

    @cached_property
    def leading_ids(self) -> tuple[int, ...]:
        """Ids that are put before a text when special tokens are added, such as that of ``<s>``."""
        encoding = self.backend.encode("a", add_special_tokens=True)
        count = next((index for index, special in enumerate(encoding.special_tokens_mask) if not special), 0)
        return tuple(encoding.ids[:count])

    @cached_property
    def prepends_space(self) -> bool:
        """Whether a space is put before every text, as tokenizers made from SentencePiece do."""
        tree = json.loads(self.backend.to_str())
        nodes = [tree.get("normalizer"), tree.get("pre_tokenizer")]
        while nodes:
            node = nodes.pop()
            if not isinstance(node, dict):
                continue
            nodes += node.get("normalizers", []) + node.get("pretokenizers", [])
            if node.get("type") == "Prepend" or node.get("add_prefix_space") is True:
                return True
            if node.get("type") == "Metaspace" and node.get("prepend_scheme", "always") != "never":
                return True
        return False

    @property
    def num_ids(self) -> int:
        """1 + the largest id: the embedding rows that a model needs."""
        return 1 + self.largest_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of ``text``; empty for an empty text unless special tokens are added."""
        # The batch form without offsets gives the same ids, sooner, and keeps other threads waiting least.
        return tuple(self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids, U+FFFD where bytes are no character. Ids the tokenizer does not know have no text."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text


def read_tokenizer(folder: Folder, model_type: str = "") -> Tokenizer | None:
    """Read the tokenizer of a model folder: ``tokenizer.json``, else ``vocab.json`` with ``merges.txt``, else a
    ``tokenizer.model`` of SentencePiece or of Llama 3.

    Args:
        model_type: of the model it is read for, where that is not told by the ``config.json`` beside it.

    Returns:
        ``None`` when the folder holds no tokenizer files.

    Raises:
        CheckpointError: a file cannot be read, breaks a rule or is a link out of the folder.
    """
    config = read_tokenizer_config(folder)
    if folder.has("tokenizer.json"):
        file = "tokenizer.json"
        backend = open_as_written(folder)
    elif folder.has("vocab.json") and folder.has("merges.txt"):
        file = "vocab.json"
        backend = _from_vocab_and_merges(folder)
    elif folder.has(SENTENCE_PIECE):
        file = SENTENCE_PIECE
        with _reading(file):
            backend, known = _from_model_file(folder, file)
        config = known | _with_added_tokens(folder, config)
    else:
        return None
    with _reading(file):
        model_config = folder.read_object("config.json") if folder.has("config.json") else {}
        model_config |= {"model_type": model_type} if model_type else {}
        class_name = tokenizer_class(config, model_config, backend)
        if file == "vocab.json" and not class_name:
            class_name = "GPT2Tokenizer"  # the files are of its form, whoever wrote them
        if file == SENTENCE_PIECE and not is_plain_bpe(backend):
            class_name = ""  # the class would read it as another model than it is
        apply_class_pipeline(backend, class_name, config, rebuilt=file != TOKENIZER_JSON)
    special = _special_tokens(folder, config, class_name)
    with _reading("tokenizer_config.json"):
        # A symbol that its user defined stays one, also where it is the named end: it does not begin a new text.
        _add_tokens(backend, config, {} if file == SENTENCE_PIECE and not class_name else special)
    with _reading(file):
        tokenizer = Tokenizer(backend, special, default_template(folder, config))
        tokenizer.decode([max(0, tokenizer.largest_id)])
    return tokenizer


def open_as_written(folder: Folder) -> tokenizers.Tokenizer:
    """``tokenizer.json`` as it is, without what the other files say, and with truncation and padding off.

    Raises:
        CheckpointError: it cannot be read, breaks a rule, or the library cannot use it.
    """
    file = "tokenizer.json"
    data = folder.read_bytes(file)
    parse_object(file, data)  # by the rules for all files, which the library does not know
    with _reading(file):
        backend = tokenizers.Tokenizer.from_buffer(data)
        # Texts are never cut or filled up: what is too long is refused by name.
        backend.no_truncation()
        backend.no_padding()
    return backend


@contextmanager
def _reading(file: str) -> Iterator[None]:
    """Whatever the tokenizers library makes of a file's content is the file's fault."""
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and its panics derive from BaseException alone
        rule = f"is not what the tokenizers library can use: {' '.join(str(error).split())[:300]}"
        raise CheckpointError(file, rule) from error


def _from_model_file(folder: Folder, file: str) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """A SentencePiece model, or Llama 3's vocabulary, which has the same name; and what it says itself of named tokens."""
    pieces = read_tiktoken(folder, file)
    if pieces is not None:
        return open_tiktoken(pieces), dict(NAMED)
    backend = open_sentencepiece(folder, file)
    named = {"bos_token": ("<s>",), "eos_token": _ENDS}
    known = {
        key: piece for key, pieces in named.items() for piece in reversed(pieces) if backend.token_to_id(piece) is not None
    }
    return backend, known


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


def _with_added_tokens(folder: Folder, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the tokens of ``added_tokens.json``, which older folders have in its stead."""
    if "added_tokens_decoder" in config or not folder.has(ADDED_TOKENS):
        return config
    added = read_added_tokens(folder)
    values = [value for key, value in {**read_special_tokens(folder), **config}.items() if key.endswith("_token")]
    named = [value.get("content") if isinstance(value, dict) else value for value in values]
    declared = {
        str(number): {"content": token, "normalized": False, "special": token in named} for token, number in added.items()
    }
    return config | {"added_tokens_decoder": declared}


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
