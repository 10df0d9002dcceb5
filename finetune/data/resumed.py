"""Whether the data of a resumed run are those it was saved with: the same content or tokens, or a change that is allowed."""

from __future__ import annotations

import filecmp
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

from checkpoint import CheckpointError
from checkpoint.disk.folder import Folder
from checkpoint.text.tokenizer import open_as_written
from finetune.config import TuneConfig
from finetune.data.made_of import MadeOf, differences, read_made_of
from finetune.data.prepared import LAYOUTS, TOKENIZERS, TOKENS, Prepared
from finetune.data.settings import files_digest
from finetune.errors import ConfigError

_SHARD_FILES = ("ids.bin", "learned.bin", "lengths.npy")
_MOST_COMBINATIONS = 4096


def agreed_data(config: TuneConfig, prepared: Prepared, settings: Mapping[str, Any], say: Callable[[str], None]) -> Prepared:
    """``prepared``, known under the name that the run was saved with too, when it may go on with these data.

    Args:
        settings: of the run's newest save; see ``finetune.train.changes.settings_of``.
        say: told what changed, when that is allowed.

    Raises:
        ConfigError: the data changed; names the files and the kinds of change.
    """
    saved_with = settings.get("data")
    if saved_with in (None, prepared.fingerprint):
        return prepared
    assert saved_with is not None
    layout = Path(prepared.folder)
    now, was = read_made_of(layout), read_made_of(layout.with_name(saved_with))
    assert now is not None, "every layout is written with what it was made of"
    agreed = replace(prepared, known_as=(saved_with,))
    if _same_tokens(now, saved_with, layout.parent.parent / TOKENS):
        return agreed
    if was is None:
        keys = {"data.seq_len": config.data.seq_len, "data.seed": config.data.seed}
        known = {key: value for key, value in keys.items() if settings.get(key, value) != value}
        what = [f"{key}: was {settings[key]}, is {value}" for key, value in known.items()]
        what = what or ["what they were is not kept in data.folder, so no file can be named"]
    else:
        what = list(differences(was, now)) or ["their tokens are others"]
    if config.data.changed == "refuse":
        rule = "they must be those it was saved with; --data.changed accept goes on with these"
        raise ConfigError(f"run.resume: the data of {config.run.output} changed: {'; '.join(what)}; {rule}")
    say(f"data.changed: accept: going on with changed data, at the same number of samples: {'; '.join(what)}")
    return agreed


def tokenizer_of(folder: Path, layout: str) -> Path | None:
    """The folder of the tokenizer that data were laid out with; ``None`` where it is not kept: by earlier releases.

    Args:
        folder: see ``finetune.data.prepare.data_folder``.
        layout: its fingerprint.
    """
    made = read_made_of(folder / LAYOUTS / layout)
    if made is None:
        return None
    places = sorted((folder / TOKENIZERS).glob("*"))
    return next((place for place in places if files_digest(place) == list(made.tokenizer)), None)


def check_tokenizer(prepared: Prepared, saved: Path) -> None:
    """Refuse a tokenizer that is not the one in the folder ``saved``, a checkpoint of the run.

    Raises:
        ConfigError: it is another one, for which the run's weights mean nothing.
    """
    if _as_written(saved) != _as_written(prepared.tokenizer_folder):
        raise ConfigError(
            f"tokenizer: is not the one of {saved}: its ids mean other text to the weights of this run; name that folder as "
            "tokenizer.path, or another run.output"
        )


def _as_written(folder: Path) -> str:
    try:
        return open_as_written(Folder(folder)).to_str()
    except CheckpointError as error:
        raise ConfigError(f"{folder / error.file}: {error.rule}") from error


def _same_tokens(now: MadeOf, saved_with: str, tokens: Path) -> bool:
    """Whether a layout of this name would be of the same tokens, in folders of other names.

    Earlier releases named folders by the paths and times of files. The tokens they left tell more than that.
    """
    others = [folder for folder in sorted(tokens.iterdir()) if folder.is_dir()]
    choices = [[name, *(o.name for o in others if o.name != name and _equal(tokens / name, o))] for name in now.names]
    return any(now.renamed(names) == saved_with for names in islice(product(*choices), _MOST_COMBINATIONS))


def _equal(one: Path, other: Path) -> bool:
    """Whether two folders hold the same shards, byte for byte."""
    shards = sorted(path.name for path in one.iterdir() if path.is_dir())
    if not one.name or shards != sorted(path.name for path in other.iterdir() if path.is_dir()):
        return False
    pairs = ((one / shard / file, other / shard / file) for shard in shards for file in _SHARD_FILES)
    return all(a.is_file() == b.is_file() and (not a.is_file() or filecmp.cmp(a, b, shallow=False)) for a, b in pairs)
