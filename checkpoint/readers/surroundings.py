"""Where a checkpoint's model configuration and tokenizer are: trainers leave them beside the weights, above, or nowhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from checkpoint.disk.folder import Folder, Renamed
from checkpoint.errors import CheckpointError
from checkpoint.given import Given
from checkpoint.model.config import (
    CODE_NAMED,
    CONFIG,
    GENERATION,
    check_config,
    check_generation_config,
    normalized,
    with_one_beginning,
)
from checkpoint.model.mxfp4 import without_mxfp4
from checkpoint.text.tokenizer_files import MERGES, SENTENCE_PIECE, TOKENIZER_FILES, TOKENIZER_JSON, VOCABULARY

NOTHING_NAMED: Mapping[str, str] = MappingProxyType({})

Configs = tuple[dict[str, Any], dict[str, Any]]
"""``config.json`` and ``generation_config.json``, checked; the second is empty if there is none."""


def read_configs(folder: Folder, name: str = CONFIG) -> Configs:
    """The configuration that lies in ``folder``, checked.

    Raises:
        CheckpointError: one of the files cannot be read or breaks a rule.
    """
    config = checked(folder.read_object(name))
    generation = folder.read_object(GENERATION) if folder.has(GENERATION) else {}
    check_generation_config(generation)
    return config, with_one_beginning(generation)


def checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, wherever it was read, as the libraries of today take it.

    Raises:
        CheckpointError: it breaks a rule.
    """
    found = without_mxfp4(config)
    check_config(found)
    return normalized(found)


def find_configs(folder: Folder, given: Given, *, above: bool) -> Configs | None:
    """The configuration that was given, or lies in ``folder``, or in the one above it; ``None`` where there is none.

    Args:
        above: whether the folder above is looked into: layouts that come as one folder hold it themselves.

    Raises:
        CheckpointError: the one that was given is not there, or one breaks a rule.
    """
    found = _config_file(folder, given, above=above)
    return None if found is None else read_configs(*found)


def config_file(folder: Folder, given: Given, *, above: bool) -> Path | None:
    """The file that ``find_configs`` reads; ``None`` where there is none, and the weights' own files have to tell."""
    found = _config_file(folder, given, above=above)
    return None if found is None else found[0].path / found[1]


def names_code(folder: Folder, given: Given, *, above: bool) -> bool:
    """Whether the file that ``find_configs`` reads names code of its folder, which is not run."""
    found = _config_file(folder, given, above=above)
    return found is not None and CODE_NAMED in found[0].read_object(found[1])


def _config_file(folder: Folder, given: Given, *, above: bool) -> tuple[Folder, str] | None:
    if given.config is not None:
        return _split(given.config, CONFIG)
    return next(((place, CONFIG) for place in _places(folder, above=above) if place.has(CONFIG)), None)


def checked_configs(folder: Folder, said: Mapping[str, Any] | None, table: str, sought: str, *, above: bool) -> Configs:
    """The configuration that the weights' own files tell, for where ``find_configs`` found none.

    Args:
        said: what they tell; ``None`` for nothing.
        table: the file that would.
        sought: where in the files it was looked for, as ``Weights`` has it.

    Raises:
        CheckpointError: they tell nothing, or what breaks a rule.
    """
    if said is None:
        looked = ", ".join(str(place.path / CONFIG) for place in _places(folder, above=above))
        inside = f" ({sought})" if sought else ""
        rule = f"does not say what model it is of{inside}, and there is no {looked}"
        raise CheckpointError(table, f"{rule}; give the model's config.json (--model-config)")
    return checked(said), {}


def find_tokenizer(
    folder: Folder, given: Given, *, above: bool, named: Mapping[str, str] = NOTHING_NAMED, inside: str = ""
) -> Folder:
    """The folder whose tokenizer belongs to the checkpoint; ``folder`` itself where none has any of a tokenizer's files.

    Args:
        named: the names that the checkpoint's trainer had for the files of its tokenizer, by the usual ones.
        inside: the folder that the trainer keeps a tokenizer in, in one of these, where they have none themselves.

    Raises:
        CheckpointError: the one that was given is not there, or is no file of a tokenizer.
    """
    if given.tokenizer is not None:
        return tokenizer_at(given.tokenizer)
    places = _places(folder, above=above)
    for place in places:
        if named and all(place.has(name) for name in named.values()):
            return Renamed(place.path, named)
    found = next(filter(has_tokenizer, places), None)
    if found is None and inside:
        below = (place.below(inside) for place in places if (place.path / inside).is_dir())
        found = next(filter(has_tokenizer, below), None)
    return found or folder


def has_tokenizer(folder: Folder) -> bool:
    """Whether there is a file of a tokenizer by a usual name."""
    return any(folder.has(name) for name in TOKENIZER_FILES)


def tokenizer_at(given: str) -> Folder:
    """The tokenizer's folder that was given, or one that has the file that was given under its usual name, and nothing else.

    A file is a ``tokenizer.json``, a ``vocab.json`` with its merges beside it, or a ``.model`` of SentencePiece or Llama 3
    (also ``.tiktoken``); what it is called does not matter, but that merges are called as the vocabulary, with ``merges`` and
    ``.txt``, or ``merges.txt``.

    Raises:
        CheckpointError: there is no such file or folder, or it is none of these.
    """
    folder, name = _split(given, TOKENIZER_JSON)
    if Path(os.path.expanduser(given)).is_dir() or name in TOKENIZER_FILES:
        return folder
    if name.endswith((".model", ".tiktoken")):
        return Renamed(folder.path, {SENTENCE_PIECE: name})
    content = folder.read_object(name)
    if isinstance(content.get("model"), dict):
        return Renamed(folder.path, {TOKENIZER_JSON: name})
    if not content or not all(isinstance(value, int) for value in content.values()):
        raise CheckpointError(given, "is neither a tokenizer.json, nor a vocabulary (pieces and their ids), nor a .model")
    merges = (f"{name.removesuffix('.json').replace('vocab', 'merges')}.txt", MERGES)
    found = next((candidate for candidate in merges if candidate != name and folder.has(candidate)), None)
    if found is None:
        raise CheckpointError(
            given, f"is a vocabulary, whose merges are not beside it, neither {' nor '.join(dict.fromkeys(merges))}"
        )
    return Renamed(folder.path, {VOCABULARY: name, MERGES: found})


def _places(folder: Folder, *, above: bool) -> list[Folder]:
    return [folder, Folder(folder.path.parent)] if above else [folder]


def _split(given: str, name: str) -> tuple[Folder, str]:
    """The folder of a file that was given, or of ``name`` in a folder that was, and the file's name."""
    path = Path(os.path.expanduser(given))
    if path.is_dir():
        return Folder(path), name
    if not path.is_file():
        raise CheckpointError(given, "is not a file or folder" if path.exists() else "there is no such file or folder")
    return Folder(path.parent), path.name
