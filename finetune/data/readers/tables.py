"""Parquet files, and data sets of the ``datasets`` library: saved on disk, or by name. Their libraries load when needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from checkpoint.readers.hub import HUB
from finetune.data.readers.items import Fault, Item, Part, Record
from finetune.errors import DataError

_ROWS_AT_ONCE = 256


class _Sized(Protocol):
    nbytes: int


class _Rows(Protocol):
    """What we use of a data set of the ``datasets`` library."""

    data: _Sized
    _fingerprint: str
    """What ``datasets`` knows the data by: their content and what was done with it."""

    def with_format(self, kind: None) -> _Rows: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> Mapping[str, Sequence[object]]:
        """Some rows, as columns by name."""
        ...


_Opened = _Rows | dict[str, _Rows]
"""One, or several by the names of their splits."""


class _RowGroup(Protocol):
    num_rows: int
    total_byte_size: int


class _Metadata(Protocol):
    num_row_groups: int

    def row_group(self, number: int) -> _RowGroup: ...


class _Batch(Protocol):
    def to_pylist(self) -> list[dict[str, object]]: ...


class _ParquetFile(Protocol):
    """What we use of ``pyarrow.parquet.ParquetFile``."""

    metadata: _Metadata

    def iter_batches(self, *, batch_size: int, row_groups: range) -> Iterator[_Batch]: ...


class ParquetReader:
    """Reads parquet files. A part is a range of row groups; a position is a row of the file, from 0."""

    def parts(self, part: Part, target_bytes: int) -> list[tuple[Part, int]]:
        metadata = _parquet(part.file).metadata
        found: list[tuple[Part, int]] = []
        begin = size = 0
        for group in range(metadata.num_row_groups):
            size += metadata.row_group(group).total_byte_size
            if size >= target_bytes or group == metadata.num_row_groups - 1:
                found.append((Part(part.file, part.kind, begin, group + 1), size))
                begin, size = group + 1, 0
        return found

    def read(self, part: Part, *, skip_invalid: bool) -> Iterator[Item]:
        file = _parquet(part.file)
        end = file.metadata.num_row_groups if part.end is None else part.end
        row = sum(file.metadata.row_group(group).num_rows for group in range(part.begin))
        try:
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=range(part.begin, end)):
                for values in batch.to_pylist():
                    yield row, Record(values)
                    row += 1
        except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
            yield row, Fault(f"cannot be read from here on: {' '.join(str(error).split())}; make the file again")

    def place(self, part: Part, position: int) -> str:
        return f"{part.file}, row {position + 1}"


class DatasetReader:
    """Reads data sets of the ``datasets`` library. A part is a range of rows; a position is a row, from 0."""

    def parts(self, part: Part, target_bytes: int) -> list[tuple[Part, int]]:
        rows = open_dataset(part.file, part.split)
        total = int(rows.data.nbytes)
        count = max(1, min(len(rows), -(-total // target_bytes)))
        bounds = [len(rows) * index // count for index in range(count + 1)]
        return [(Part(part.file, part.kind, begin, end, part.split), total // count) for begin, end in pairwise(bounds)]

    def read(self, part: Part, *, skip_invalid: bool) -> Iterator[Item]:
        rows = open_dataset(part.file, part.split)
        end = len(rows) if part.end is None else part.end
        for begin in range(part.begin, end, _ROWS_AT_ONCE):
            columns = rows[begin : min(end, begin + _ROWS_AT_ONCE)]
            names = list(columns)
            for index, values in enumerate(zip(*columns.values(), strict=True)):
                yield begin + index, Record(dict(zip(names, values, strict=True)))

    def place(self, part: Part, position: int) -> str:
        return f"{part.file}, row {position + 1}"


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``save_to_disk`` made this folder."""
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    )


@lru_cache(maxsize=8)
def open_dataset(path: Path, split: str | None) -> _Rows:
    """A data set of the ``datasets`` library, memory-mapped, giving plain Python values.

    Args:
        path: a folder of ``save_to_disk``, or ``hf:NAME[,CONFIG][:SPLIT]``.

    Raises:
        DataError: it cannot be opened, or has no such split.
    """
    import datasets

    datasets.disable_progress_bars()
    name = str(path)
    try:
        found: _Opened
        found = _by_name(name.removeprefix(HUB), split) if name.startswith(HUB) else datasets.load_from_disk(name)
    except Exception as error:  # each loader of the library raises its own kinds
        what = " ".join(str(error).split())
        remedy = "check the name, or download it where there is a network and give the folder of its save_to_disk"
        raise DataError(f"{name}: datasets cannot open it: {what}; {remedy}") from error
    if isinstance(found, dict):
        names = list(found)
        wanted = split or ("train" if "train" in found or len(names) != 1 else names[0])
        if wanted not in found:
            raise DataError(f"{name}: has no split {wanted!r}; name one of {', '.join(names)} by split")
        found = found[wanted]
    return found.with_format(None)


def _by_name(name: str, split: str | None) -> _Opened:
    import datasets

    name, _, named_split = name.partition(":")
    name, _, config = name.partition(",")
    opened: _Opened = datasets.load_dataset(name, config or None, split=split or named_split or "train")
    return opened


def _parquet(file: Path) -> _ParquetFile:
    import pyarrow.parquet

    try:
        opened: _ParquetFile = pyarrow.parquet.ParquetFile(file)
        return opened
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: not a parquet file: {' '.join(str(error).split())}; make the file again") from error
