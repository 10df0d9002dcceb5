"""What a run's data is made from: sources found, formats and packing decided; and the fingerprints that name it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from checkpoint.disk.content import sampled_sha256
from finetune.config import TuneConfig
from finetune.data.readers import kind_of
from finetune.data.readers.megatron import has_labels, labels_of
from finetune.data.readers.tables import open_dataset
from finetune.data.sources import Source, source_of
from finetune.errors import DataError

_FORMAT_VERSION = 2
"""Version of what is kept on disk: another one finds nothing of the others."""


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
    """What the tokens of a source depend on, but for the tokenizer: what its files hold, in their order, and how they are read.

    Not their names and times: data that were touched, moved or downloaded again are the same data.
    """
    files = [[kind_of(Path(name), records=source.lists), size, digest] for name, size, digest in contents_of(source)]
    return [files, *how_read(source)]


def how_read(source: Source) -> list[object]:
    """How the files of a source are read, for its identity."""
    keys = [source.text_key, source.prompt_key, source.completion_key, source.messages_key]
    skips = ["skip"] if source.invalid == "skip" else []  # without it, as it was before there was a choice
    return [source.invalid_text, source.format, source.lists, source.split, keys, *skips]


def contents_of(source: Source) -> list[tuple[str, int, str]]:
    """Each file of a source: its path, its bytes (0 of a data set by name), and a hash of what it holds.

    Raises:
        DataError: one cannot be read.
    """
    found: list[tuple[str, int, str]] = []
    for file in source.files:
        for path in _files_of(file):
            try:
                if path.is_file():
                    status = path.stat()
                    found.append((str(path), status.st_size, _hash_of(path, status.st_size, status.st_mtime_ns)))
                else:  # a data set by name
                    found.append((str(path), 0, str(open_dataset(path, source.split)._fingerprint)))
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return found


def _files_of(file: Path) -> list[Path]:
    """The files behind an entry of a source: those of a saved data set, or of Megatron's pair with its labels."""
    if file.is_dir():
        return sorted(path for path in file.rglob("*") if path.is_file())
    if file.suffix != ".idx":
        return [file]
    indices = [file, labels_of(file)] if has_labels(file) else [file]
    return [path for index in indices for path in (index, index.with_suffix(".bin"))]


@lru_cache(maxsize=1 << 16)
def _hash_of(path: Path, num_bytes: int, time_ns: int) -> str:
    """Once in a process, as long as the file keeps its size and time."""
    return sampled_sha256(path)


def digest(*values: object) -> str:
    """A name of 16 hexadecimal digits for what these values, which JSON can hold, make of the data."""
    return hashlib.sha256(json.dumps([_FORMAT_VERSION, *values]).encode()).hexdigest()[:16]
