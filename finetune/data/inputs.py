"""What a run's data is made from: sources found, formats and packing decided; and the fingerprints that name it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from finetune.config import TuneConfig
from finetune.data.readers.tables import open_dataset
from finetune.data.sources import Source, source_of

_FORMAT_VERSION = 2
"""Of what is kept on disk: another one finds nothing of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run's data is made from, found and checked, before anything is tokenised."""

    train: tuple[Source, ...]
    held_out: tuple[Source, ...]
    packing: str

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.train + self.held_out


def find_inputs(config: TuneConfig) -> Inputs:
    """Find all files and decide on their formats and on the packing.

    Raises:
        DataError: a source has no files, or its records no known shape.
    """
    data = config.data
    train = tuple(source_of(data, entry, "data.train") for entry in data.sources("train"))
    held_out = tuple(source_of(data, entry, "data.eval") for entry in data.sources("eval"))
    packing = data.packing
    if packing == "auto":
        packing = "isolate" if any(source.masked for source in train + held_out) else "join"
    return Inputs(train=train, held_out=held_out, packing=packing)


def nothing_in(source: Source) -> str:
    """What is said of a source without a document."""
    more = f" and {len(source.files) - 1} more files" if len(source.files) > 1 else ""
    return f"{source.files[0]}{more}: no document in it: it is empty; leave it out of the data, or give the file that was meant"


def source_identity(source: Source) -> object:
    """What the tokens of a source depend on, but for the tokenizer: its files by name, size and time, and how they are read."""
    files: list[object] = []
    for file in source.files:
        paths = sorted(path for path in file.rglob("*") if path.is_file()) if file.is_dir() else [file]
        if file.suffix == ".idx":
            paths.append(file.with_suffix(".bin"))
        for path in paths:
            if path.is_file():
                status = path.stat()
                files.append([str(path.resolve()), status.st_size, status.st_mtime_ns])
            else:  # a data set by name
                files.append([str(path), open_dataset(path, source.split)._fingerprint])
    keys = [source.text_key, source.prompt_key, source.completion_key, source.messages_key]
    skips = ["skip"] if source.invalid == "skip" else []  # without it, as it was before there was a choice
    return [files, source.invalid_text, source.format, source.lists, source.split, keys, *skips]


def digest(*values: object) -> str:
    return hashlib.sha256(json.dumps([_FORMAT_VERSION, *values]).encode()).hexdigest()[:16]
