"""The tokenizer of a run: the model's own, a given one, or one learned from the data. Always ``tokenizer.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from checkpoint import CheckpointError
from checkpoint.folder import Folder
from checkpoint.tokenizer_files import TOKENIZER_FILES, check_tokenizer_files
from finetune.config import TrainTokenizerConfig
from finetune.data.readers import Piece
from finetune.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
"""What belongs to a tokenizer and travels with every checkpoint; only the first is needed."""


def train_tokenizer(pieces: Iterator[Piece], config: TrainTokenizerConfig, folder: Path) -> None:
    """Learn a byte-level BPE from at most ``config.max_bytes`` of text and save it in ``folder``.

    The result opens in ``tokenizers`` and in transformers, and any text comes back unchanged from its ids.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
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
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def _up_to(pieces: Iterator[Piece], max_bytes: int) -> Iterator[str]:
    for piece in pieces:
        if max_bytes <= 0:
            return
        yield piece.text
        max_bytes -= len(piece.text.encode("utf-8"))


def copy_tokenizer(source: Path, folder: Path, key: str) -> None:
    """Copy the tokenizer's files of ``source`` into ``folder``; a tokenizer of older files is converted by transformers.

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
        _settle_pipeline(source, folder / "tokenizer.json")
        return
    try:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False).save_pretrained(folder)
    except Exception as error:
        raise ConfigError(f"{key}: {source} has no tokenizer.json, and what it has does not open: {error}") from error
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{key}: {source} has no tokenizer.json, and its tokenizer cannot be written as one")


def read_tokenizer_files(source: Path) -> dict[str, bytes]:
    """The tokenizer's files of a folder by name, checked by the rules that serving has for them.

    Raises:
        CheckpointError: one of them cannot be read, is a link out of the folder, or breaks a rule.
    """
    folder = Folder(source)
    check_tokenizer_files(folder)
    return {name: folder.read_bytes(name) for name in TOKENIZER_FILES if folder.has(name)}


def _settle_pipeline(source: Path, copy: Path) -> None:
    """Give the file the pipeline of its class, and the tokens that only ``tokenizer_config.json`` declares.

    Tokens that transformers would add beyond those stay out: the model has no rows for them.
    """
    from transformers import AutoTokenizer

    try:
        opened = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        theirs = opened.backend_tokenizer
    except Exception:  # an unknown class, or none: the file stands for itself, and is checked when it is opened
        return
    ours = open_tokenizer(copy.parent)
    before = ours.to_str()
    declared = {int(number) for number in opened.init_kwargs.get("added_tokens_decoder", {})}
    known = {token.content for token in ours.get_added_tokens_decoder().values()}
    for number, token in sorted(theirs.get_added_tokens_decoder().items()):
        if number in declared and token.content not in known:
            ours.add_tokens([token])
            if ours.token_to_id(token.content) != number:
                raise ConfigError(
                    f"{source / 'tokenizer_config.json'}: gives {token.content!r} the id {number}; "
                    f"the vocabulary's next free id is {ours.token_to_id(token.content)}"
                )
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        setattr(ours, part, getattr(theirs, part))
    if ours.to_str() != before:
        ours.save(str(copy))


def open_tokenizer(folder: Path) -> Tokenizer:
    """Open ``tokenizer.json`` of ``folder``, with truncation and padding off.

    Raises:
        ConfigError: it is missing or broken.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path}: missing")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises the bare Exception
        raise ConfigError(f"{path}: not a tokenizer that tokenizers {tokenizers.__version__} opens: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def num_ids(tokenizer: Tokenizer) -> int:
    """1 + the largest id, added tokens included: the embedding rows a model needs."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def end_of_text_id(folder: Path, tokenizer: Tokenizer) -> int:
    """Id of the token that ends a document: ``eos_token`` of tokenizer_config.json, else ``<|endoftext|>`` or ``</s>``.

    Raises:
        ConfigError: the tokenizer names none.
    """
    names: list[str] = []
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / file).is_file():
            token = json.loads((folder / file).read_text(encoding="utf-8")).get("eos_token")
            names += [token["content"]] if isinstance(token, dict) else [token] if isinstance(token, str) else []
    for name in (*names, END_OF_TEXT, "</s>"):
        if (token_id := tokenizer.token_to_id(name)) is not None:
            return int(token_id)
    raise ConfigError(f"{folder / 'tokenizer_config.json'}: names no eos_token that is in tokenizer.json; documents need one")
