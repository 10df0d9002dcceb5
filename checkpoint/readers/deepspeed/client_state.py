"""The model's configuration and tokenizer that a training script keeps in its saves.

What it gives an engine as ``client_state`` lies at the top of the engine's files, beside the module.
"""

from __future__ import annotations

import json
from typing import Any, Final

from checkpoint.disk.folder import Folder, Written, parse_object
from checkpoint.errors import CheckpointError, shown
from checkpoint.given import Given
from checkpoint.readers.deepspeed.saves import Saved
from checkpoint.readers.files.pickles import DTYPES
from checkpoint.readers.surroundings import checked, config_file, find_configs, find_tokenizer
from checkpoint.text.tokenizer_files import TOKENIZER_CONFIG, TOKENIZER_FILES, TOKENIZER_JSON

KEYS: Final = ("model_config", "config")
"""Where a configuration is looked for, in this order: ``config.to_dict()`` of transformers, or the same as the text of JSON."""
SOUGHT: Final = f"its client_state has no model_type in {' or '.join(KEYS)}"
"""For messages, where it is in neither."""

TOKENIZER: Final = "tokenizer"
"""Where the text of a ``tokenizer.json`` is looked for: ``tokenizer.backend_tokenizer.to_str()`` of transformers."""
TOKENIZER_SETTINGS: Final = "tokenizer_config"
"""What a ``tokenizer_config.json`` would hold, beside it: a mapping, or the text of JSON."""

_DTYPE_KEYS: Final = ("dtype", "torch_dtype")
_NAMES_OF_DTYPES: Final = {ours: torchs for torchs, ours in DTYPES.items()}


def client_config(folder: Folder, given: Given, saved: Saved) -> dict[str, Any] | None:
    """The configuration in the client state that a file holds, checked; ``None`` where none there names a model type.

    So it is where one was given or lies in a file of its own, which comes first.

    Raises:
        CheckpointError: it breaks a rule, or holds what JSON has no form for.
    """
    if config_file(folder, given, above=True) is not None:
        return None
    for key in KEYS:
        try:
            config = _config(saved.file, saved.get(key))
            if config is not None:
                return checked(config)
        except CheckpointError as error:
            raise CheckpointError(saved.file, f"its client_state has a {key} that is no configuration: {error.rule}") from error
    return None


def known_config(folder: Folder, given: Given, client: dict[str, Any] | None) -> dict[str, Any]:
    """The configuration that the model will have: the given one, a file's, or ``client`` of ``client_config``; else empty.

    Raises:
        CheckpointError: a file's breaks a rule.
    """
    configs = find_configs(folder, given, above=True)
    return (client or {}) if configs is None else configs[0]


def client_tokenizer(folder: Folder, given: Given, saved: Saved) -> Folder | None:
    """The tokenizer in the client state that a file holds; ``None`` where there is none.

    So it is where one was given or lies in files of its own, which come first.

    Raises:
        CheckpointError: it is no JSON, or its settings hold what JSON has no form for.
    """
    text, settings = saved.get(TOKENIZER), saved.get(TOKENIZER_SETTINGS)
    if given.tokenizer is not None or not isinstance(text, str) or '"model"' not in text:
        return None
    found = find_tokenizer(folder, given, above=True)
    if any(found.has(name) for name in TOKENIZER_FILES):
        return None
    try:
        files = {TOKENIZER_JSON: _bytes(parse_object(saved.file, text.encode("utf-8", "surrogatepass")))}
        if isinstance(settings, str):
            settings = parse_object(saved.file, settings.encode("utf-8", "surrogatepass"))
        if isinstance(settings, dict):
            files[TOKENIZER_CONFIG] = _bytes(_plain(saved.file, settings))
    except CheckpointError as error:
        raise CheckpointError(saved.file, f"its client_state has a {TOKENIZER} that cannot be read: {error.rule}") from error
    return Written(folder.path, files)


def _bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


def _config(file: str, value: object) -> dict[str, Any] | None:
    """A value of the client state as ``config.json`` would hold it; ``None`` for something else, such as a run's settings."""
    if isinstance(value, str) and '"model_type"' in value:
        return parse_object(file, value.encode("utf-8", "surrogatepass"))
    if not isinstance(value, dict) or "model_type" not in value:
        return None
    named = {key: _NAMES_OF_DTYPES.get(value[key], value[key]) for key in _DTYPE_KEYS if isinstance(value.get(key), str)}
    return parse_object(file, _bytes(_plain(file, {**value, **named})))


def _plain(file: str, value: Any) -> Any:
    """The value without anything that JSON has no form for. Numbers that are keys become text, as JSON has them.

    Raises:
        CheckpointError: there is something else in it.
    """
    if isinstance(value, dict):
        wrong = next((key for key in value if type(key) not in (str, int)), None)
        if wrong is not None:
            raise CheckpointError(file, f"{shown(wrong)} is a key, which JSON has no form for")
        return {key: _plain(file, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [_plain(file, item) for item in value]
    if value is not None and type(value) not in (str, int, float, bool):
        raise CheckpointError(file, f"{shown(value)} is in it, which JSON has no form for")
    return value
