"""What a checkpoint's tokenizer files and chat template must say before a library is handed them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from checkpoint.disk.folder import Folder
from checkpoint.errors import CheckpointError, shown

TOKENIZER_CONFIG, SPECIAL_TOKENS, TEMPLATE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
TOKENIZER_JSON, VOCABULARY, MERGES, SENTENCE_PIECE = "tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model"
ADDED_TOKENS = "added_tokens.json"
TOKENIZER_FILES = (
    TOKENIZER_JSON,
    "tokenizer_config.json",
    "special_tokens_map.json",
    TEMPLATE,
    ADDED_TOKENS,
    VOCABULARY,
    MERGES,
    SENTENCE_PIECE,
)
"""All that belongs to a tokenizer, the one that must be there first."""
TOKENIZER_FORMS = (TOKENIZER_JSON, f"{VOCABULARY} with {MERGES}", SENTENCE_PIECE)
"""Files that are a tokenizer by themselves."""
MAX_IDS = 1 << 32
MAX_TEMPLATE_BYTES = 1 << 20
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Switches of a token that ``added_tokens_decoder`` declares."""

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OBJECTS = ("tokenizer.json", "vocab.json", "added_tokens.json")
_OTHERS = ("merges.txt", "tokenizer.model")


def read_tokenizer_config(folder: Folder) -> dict[str, Any]:
    """``tokenizer_config.json``, in which what is used has the types that it is used by; empty if there is none.

    Raises:
        CheckpointError: names the key, its value and the rule.
    """
    config = folder.read_object(TOKENIZER_CONFIG) if folder.has(TOKENIZER_CONFIG) else {}
    _check_named(TOKENIZER_CONFIG, config)
    if not isinstance(config.get("tokenizer_class", ""), str | None):
        _refuse("tokenizer_class", config["tokenizer_class"], "a name")
    for key in ("add_prefix_space", "add_bos_token", "add_eos_token", "legacy"):
        if not isinstance(config.get(key), bool | None):
            _refuse(key, config[key], "true, false or null")
    _check_declared(config.get("added_tokens_decoder"))
    return config


def read_special_tokens(folder: Folder) -> dict[str, Any]:
    """``special_tokens_map.json``, by the same rules; empty if there is none.

    Raises:
        CheckpointError: names the key, its value and the rule.
    """
    tokens = folder.read_object(SPECIAL_TOKENS) if folder.has(SPECIAL_TOKENS) else {}
    _check_named(SPECIAL_TOKENS, tokens)
    return tokens


def read_added_tokens(folder: Folder) -> dict[str, int]:
    """``added_tokens.json``: ids by token.

    Raises:
        CheckpointError: names the token whose id is none, or that is empty.
    """
    tokens = folder.read_object(ADDED_TOKENS)
    for token, number in tokens.items():
        if not token or type(number) is not int or not 0 <= number < MAX_IDS:
            _refuse(token, number, "an id from 0 up, of a token that is not empty", ADDED_TOKENS)
    return tokens


def default_template(folder: Folder, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """The default chat template and the file it is in: ``chat_template.jinja`` goes before ``tokenizer_config.json``, which has
    given it in three forms; ``None`` if there is none.

    Raises:
        CheckpointError: it cannot be read, or is no text.
    """
    if folder.has(TEMPLATE):
        return folder.read_text(TEMPLATE, limit=MAX_TEMPLATE_BYTES), TEMPLATE
    found = config.get("chat_template")
    if isinstance(found, list):
        if not all(isinstance(entry, dict) for entry in found):
            raise CheckpointError(TOKENIZER_CONFIG, "chat_template has an entry that is no object of name and template")
        found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
    elif isinstance(found, dict):
        found = found.get("default")
    if found is not None and not isinstance(found, str):
        raise CheckpointError(TOKENIZER_CONFIG, f"chat_template is {type(found).__name__}; a text is expected")
    return None if found is None else (found, TOKENIZER_CONFIG)


def check_tokenizer_files(folder: Folder) -> None:
    """Refuse tokenizer files that a library would stumble over, whichever of them it reads.

    Raises:
        CheckpointError: a file cannot be read, is a link out of the folder, or breaks a rule.
    """
    default_template(folder, read_tokenizer_config(folder))
    read_special_tokens(folder)
    for name in _OBJECTS:
        if folder.has(name):
            folder.read_object(name)
    for name in _OTHERS:
        if folder.has(name):
            folder.read_text(name) if name.endswith(".txt") else folder.read_bytes(name)


def _check_declared(declared: object) -> None:
    if declared is None:
        return
    if not isinstance(declared, dict):
        _refuse("added_tokens_decoder", declared, "an object from ids to tokens")
    for token_id, entry in declared.items():
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) < 12 and int(token_id) < MAX_IDS):
            _refuse("added_tokens_decoder", token_id, "an object whose keys are ids from 0 up")
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str) or not entry["content"]:
            _refuse(f"added_tokens_decoder.{token_id}", entry, "an object with a text as content")
        for flag in FLAGS:
            if not isinstance(entry.get(flag, False), bool):
                _refuse(f"added_tokens_decoder.{token_id}.{flag}", entry[flag], "true or false")


def _check_named(file: str, tokens: Mapping[str, Any]) -> None:
    for key in _NAMED:
        value = tokens.get(key)
        content = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(content, str):
            _refuse(key, value, "a text, an object with a text as content, or null", file)


def _refuse(key: str, value: object, rule: str, file: str = TOKENIZER_CONFIG) -> NoReturn:
    raise CheckpointError(file, f"{key} is {shown(value)}; it must be {rule}")
