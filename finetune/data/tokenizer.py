"""The tokenizer of a run: the model's own, a given one, or one learned from the data. Always ``tokenizer.json``."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from checkpoint import CheckpointError
from checkpoint.disk.folder import Folder, Renamed, Written
from checkpoint.model.config import CONFIG
from checkpoint.text.tokenizer import END_OF_TEXT, Tokenizer, open_as_written, read_tokenizer
from checkpoint.text.tokenizer_class import CLASS_WHATEVER_IS_NAMED, apply_class_pipeline
from checkpoint.text.tokenizer_files import (
    MERGES,
    SENTENCE_PIECE,
    TEMPLATE,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    TOKENIZER_JSON,
    VOCABULARY,
    check_tokenizer_files,
)
from finetune.config import TrainTokenizerConfig
from finetune.data.readers import Piece
from finetune.errors import ConfigError

_AS_WRITTEN = "PreTrainedTokenizerFast"
"""The class of transformers that takes ``tokenizer.json`` as it is."""


def train_tokenizer(pieces: Iterator[Piece], config: TrainTokenizerConfig, folder: Path, class_name: str = "") -> None:
    """Learn a byte-level BPE from at most ``config.max_bytes`` of text and save it in ``folder``.

    The result opens in ``tokenizers`` and in transformers, and any text comes back from its ids: unchanged, or in the Unicode
    form that ``class_name`` makes of it.

    Args:
        class_name: the tokenizer class that the model's files are read with whatever they name; words are cut as it does.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    apply_class_pipeline(tokenizer, class_name, {}, rebuilt=False)
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_up_to(pieces, config.max_bytes), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    description = {
        "tokenizer_class": class_name or _AS_WRITTEN,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),
    }
    _write_config(folder / TOKENIZER_CONFIG, description)


def _up_to(pieces: Iterator[Piece], max_bytes: int) -> Iterator[str]:
    for piece in pieces:
        if max_bytes <= 0:
            return
        yield piece.text
        max_bytes -= len(piece.text.encode("utf-8"))


def copy_tokenizer(source: Path, folder: Path, key: str) -> None:
    """Copy the tokenizer's files of ``source`` into ``folder``; one of older files becomes a ``tokenizer.json``.

    Most tokenizer classes of transformers build normalizer, pre-tokenizer, post-processor and decoder themselves, whatever
    ``tokenizer.json`` says. The copy has what the class builds: a run learns the ids that transformers and the server give.

    Raises:
        ConfigError: there is no tokenizer in ``source``, or a file of it is broken; names ``key``.
    """
    try:
        files = read_tokenizer_files(source)
    except CheckpointError as error:
        raise ConfigError(f"{key}: {source}: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    if "tokenizer.json" in files:
        for name, data in files.items():
            (folder / name).write_bytes(data)
        _settle_pipeline(source, folder)
        return
    bare = {VOCABULARY, MERGES} <= files.keys() and TOKENIZER_CONFIG not in files and not (source / CONFIG).is_file()
    if _is_sentencepiece(files) or bare:  # transformers does not open a bare vocabulary, and the form tells the class
        try:
            _write_as_one(Folder(source), folder)
        except CheckpointError as error:
            raise ConfigError(f"{key}: {source}: {error}") from error
        return
    # What is left are forms that only transformers reads, such as a vocab.txt, and a vocabulary with a class of its own. It
    # writes them once; whoever opens the copy, this run included, reads it by checkpoint.text.
    try:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False).save_pretrained(folder)
    except Exception as error:
        raise ConfigError(f"{key}: {source} has no tokenizer.json, and what it has does not open: {error}") from error
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{key}: {source} has no tokenizer.json, and its tokenizer cannot be written as one")


def usual_folder(tokenizer: Folder, key: str) -> Path:
    """The folder with a tokenizer's files; of one whose files have names of their own, or are none, a copy that is gone with
    this process.

    Raises:
        ConfigError: the files are none that open; names ``key``.
    """
    if not isinstance(tokenizer, Renamed | Written) and not _is_sentencepiece(tokenizer.names()):
        return tokenizer.path
    folder = Path(tempfile.mkdtemp(prefix="tessera-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        _write_as_one(tokenizer, folder)
    except CheckpointError as error:
        raise ConfigError(f"{key}: {tokenizer.path}: {error}") from error
    return folder


def _is_sentencepiece(names: Collection[str]) -> bool:
    """Whether files of these names make a tokenizer of the SentencePiece model among them."""
    return SENTENCE_PIECE in names and not {TOKENIZER_JSON, VOCABULARY} & set(names)


def _write_as_one(tokenizer: Folder, folder: Path) -> None:
    """Write the tokenizer as a ``tokenizer.json`` that stands for itself, with its named tokens and its template beside it.

    Raises:
        CheckpointError: there is none, or it does not open.
    """
    opened = read_tokenizer(tokenizer)
    if opened is None:
        raise CheckpointError(str(tokenizer.path), "holds no file of a tokenizer")
    if tokenizer.has(TOKENIZER_JSON):
        (folder / TOKENIZER_JSON).write_bytes(tokenizer.read_bytes(TOKENIZER_JSON))
    else:
        opened.backend.save(str(folder / TOKENIZER_JSON))
    if opened.template is not None:
        (folder / TEMPLATE).write_text(opened.template[0], encoding="utf-8")
    _write_config(folder / TOKENIZER_CONFIG, {"tokenizer_class": _AS_WRITTEN, **opened.special_tokens})


def read_tokenizer_files(source: Path) -> dict[str, bytes]:
    """The tokenizer's files of a folder by name, checked by the rules that serving has for them.

    Raises:
        CheckpointError: one of them cannot be read, is a link out of the folder, or breaks a rule.
    """
    folder = Folder(source)
    check_tokenizer_files(folder)
    return {name: folder.read_bytes(name) for name in TOKENIZER_FILES if folder.has(name)}


def _settle_pipeline(source: Path, copy: Path) -> None:
    """Give the file the pipeline of its class, and the tokens that only ``tokenizer_config.json`` declares; and name the class.

    Where none is named it follows from the model beside the files, which may be another one in what is trained.
    Tokens that transformers would add beyond those stay out: the model has no rows for them.
    """
    # The reader of checkpoint.text knows the classes of the families that are served. Some fifty others of transformers build
    # pipelines too (Gemma's, BERT's, RoBERTa's), which it does not repeat: here they are asked for, so that the copy holds
    # them, and from then on that reader gives transformers' ids of it.
    from transformers import AutoTokenizer

    try:
        opened = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        theirs = opened.backend_tokenizer
    except Exception:  # an unknown class, or none: the file stands for itself, and is checked when it is opened
        _name_class(copy / TOKENIZER_CONFIG, _AS_WRITTEN)
        return
    try:
        ours = open_as_written(Folder(copy))
    except CheckpointError as error:
        raise ConfigError(f"{copy / error.file}: {error.rule}") from error
    before = ours.to_str()
    declared = {int(number) for number in opened.init_kwargs.get("added_tokens_decoder", {})}
    known = {token.content for token in ours.get_added_tokens_decoder().values()}
    for number, token in sorted(theirs.get_added_tokens_decoder().items()):
        if number in declared and token.content not in known:
            ours.add_tokens([token])
            if ours.token_to_id(token.content) != number:
                raise ConfigError(
                    f"{source / TOKENIZER_CONFIG}: gives {token.content!r} the id {number}; "
                    f"the vocabulary's next free id is {ours.token_to_id(token.content)}"
                )
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        setattr(ours, part, getattr(theirs, part))
    if ours.to_str() != before:
        ours.save(str(copy / "tokenizer.json"))
    _name_class(copy / TOKENIZER_CONFIG, type(opened).__name__)


def set_class(folder: Path, model_type: str, key: str) -> None:
    """Have the copy in ``folder`` name the tokenizer class that a checkpoint of ``model_type`` is read with, where that is one
    whatever the files name and it makes other ids of a text: what is trained is then what is served.

    Raises:
        ConfigError: the vocabulary is not one that the class can be used with; names ``key``.
    """
    if is_served_alike(folder, model_type):
        return
    class_name = CLASS_WHATEVER_IS_NAMED[model_type]
    if class_name:
        served = open_tokenizer(folder, model_type)
        if any(letter not in served.backend.get_vocab() for letter in _letters()):
            raise ConfigError(
                f"{key}: a model of model_type {model_type} is read with {class_name}, whatever its tokenizer's files say, and "
                f"the vocabulary is not the byte-level one that {class_name} needs; give a byte-level tokenizer, or learn one "
                "(tokenizer.train)"
            )
        written = open_as_written(Folder(folder))
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            setattr(written, part, getattr(served.backend, part))
        written.save(str(folder / "tokenizer.json"))
    file = folder / TOKENIZER_CONFIG
    _write_config(file, {**_config_in(file), "tokenizer_class": class_name or _AS_WRITTEN})


def is_served_alike(folder: Path, model_type: str) -> bool:
    """Whether the files in ``folder`` give the same ids, and templates the same special tokens, beside a model of that type."""
    if model_type not in CLASS_WHATEVER_IS_NAMED:
        return True
    one, other = open_tokenizer(folder), open_tokenizer(folder, model_type)
    return one.backend.to_str() == other.backend.to_str() and one.special_tokens == other.special_tokens


@cache
def _letters() -> frozenset[str]:
    """How byte-level vocabularies write the bytes that UTF-8 text can hold."""
    text = "".join(map(chr, [*range(0x800), *range(0x800, 0xD800, 0x800), *range(0xE000, 0x110000, 0x1000)]))
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return frozenset("".join(piece for piece, _ in as_bytes.pre_tokenize_str(text)))


def _name_class(file: Path, name: str) -> None:
    config = _config_in(file)
    if not config.get("tokenizer_class"):
        config["tokenizer_class"] = _AS_WRITTEN if name == "TokenizersBackend" else name  # the new name of the same
        _write_config(file, config)


def _config_in(file: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return config


def _write_config(file: Path, config: dict[str, Any]) -> None:
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def open_tokenizer(folder: Path, model_type: str = "") -> Tokenizer:
    """The tokenizer in ``folder``, as a server reads it.

    Args:
        model_type: of the model it is read for, where no ``config.json`` beside it says so.

    Raises:
        ConfigError: it is missing or broken.
    """
    try:
        tokenizer = read_tokenizer(Folder(folder), model_type)
    except CheckpointError as error:
        raise ConfigError(f"{folder / error.file}: {error.rule}") from error
    if tokenizer is None:
        raise ConfigError(f"{folder / 'tokenizer.json'}: missing")
    return tokenizer


def end_of_text_id(folder: Path, tokenizer: Tokenizer) -> int:
    """Id of the token that ends a document.

    Raises:
        ConfigError: the tokenizer, which is that of ``folder``, has none.
    """
    if tokenizer.end_of_text_id is None:
        raise ConfigError(f"{folder / TOKENIZER_CONFIG}: names no eos_token that is in tokenizer.json; documents need one")
    return tokenizer.end_of_text_id
