"""Where text comes from: files, folders, globs, data sets; and how they are cut into units of work."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from checkpoint.readers.hub import HUB
from finetune.config import DataConfig, SourceConfig
from finetune.data.readers import READERS, Fault, Item, Part, Piece, Record, Tokens, cut, kind_of
from finetune.data.readers.jsonl import JsonlReader
from finetune.data.readers.megatron import has_labels
from finetune.data.readers.tables import is_saved_dataset
from finetune.data.samples import Keys, Malformed, detect, parse, texts_of
from finetune.errors import DataError

__all__ = ["Piece", "Source", "Unit", "find_files", "place_of", "places_of", "source_of", "units_of"]

UNIT_BYTES = 32 << 20
"""About as much is tokenised in one piece of work, and lost when that is interrupted."""
_PEEK = 100

Unit = tuple[Part, ...]
"""What one process tokenises into one shard; the same units for the same files, whoever works on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The files of one data set, in a fixed order, and how they are read."""

    files: tuple[Path, ...]
    """Files, folders of saved data sets, and ``hf:`` names."""
    invalid_text: str = "refuse"
    """``refuse`` or ``skip`` files that are not UTF-8."""
    invalid: str = "refuse"
    """``refuse`` or ``skip`` records that cannot be used."""
    text_key: str = "text"
    prompt_key: str = "prompt"
    completion_key: str = "completion"
    messages_key: str | None = None
    format: str = "text"
    """Shape of the records; never ``auto`` once ``source_of`` made it."""
    lists: bool = False
    """Whether a ``.json`` file is a list of records; otherwise it is text, as in a folder of code."""
    split: str | None = None
    weight: float = 1.0

    @property
    def keys(self) -> Keys:
        return Keys(self.text_key, self.prompt_key, self.completion_key, self.messages_key)

    @property
    def holds_samples(self) -> bool:
        """Whether its records are prompts or conversations rather than text."""
        return self.format != "text"

    @property
    def masked(self) -> bool:
        """Whether some tokens may not be targets."""
        return self.holds_samples or any(has_labels(file) for file in self.files)

    def parts(self) -> Iterator[Part]:
        """Each file as one whole part."""
        for file in self.files:
            yield Part(file, kind_of(file, records=self.lists), 0, None, self.split)

    def pieces(self, *, skip_faults: bool = False) -> Iterator[Piece]:
        """All text once, in order: documents, or what the records say.

        Raises:
            DataError: a file or line cannot be read; the message names it.
        """
        for part in self.parts():
            for position, item in self._items(part, skip_faults):
                if isinstance(item, Fault):
                    if skip_faults:
                        continue
                    raise DataError(f"{place_of(part, position)}: {item.message}")
                if isinstance(item, Tokens):
                    raise DataError(f"{place_of(part, position)}: holds token ids; text is needed here")
                if isinstance(item, Piece):
                    yield item
                    continue
                try:
                    for text in texts_of(parse(item.values, self.format, self.keys)):
                        yield from cut(text)
                except Malformed as error:
                    if not skip_faults:
                        raise DataError(f"{place_of(part, position)}: {error}") from None

    def _items(self, part: Part, skip_faults: bool) -> Iterator[Item]:
        """What ``read_part`` gives; a file that cannot be opened as what it is gives nothing where faults are skipped."""
        try:
            yield from read_part(part, self)
        except DataError:
            if not skip_faults:
                raise


def read_part(part: Part, source: Source) -> Iterator[Item]:
    """Everything in ``part``; a file that is not of the source's shape is a fault."""
    if part.kind == "text" and source.holds_samples:
        rule = f"a plain file holds no {source.format} records; give JSONL or parquet, or set data.format to text"
        return iter([(0, Fault(rule))])
    return READERS[part.kind].read(part, skip_invalid=source.invalid_text == "skip")


def place_of(part: Part, position: int) -> str:
    """``file, line 3``: for messages."""
    return READERS[part.kind].place(part, position)


def places_of(part: Part, positions: Sequence[int]) -> list[str]:
    """``place_of`` for many positions of one part in ascending order, in one pass over its file."""
    reader = READERS[part.kind]
    return reader.places(part, positions) if isinstance(reader, JsonlReader) else [place_of(part, p) for p in positions]


def source_of(config: DataConfig, entry: SourceConfig, key: str) -> Source:
    """The source an entry of ``data.train`` or ``data.eval`` stands for, its format decided.

    Raises:
        DataError: there is no such file, or its first record has no known shape.
    """
    files = find_files([entry.path], entry.pattern or config.pattern, key)
    wanted = entry.format or config.format
    named = wanted == "auto" and len(files) == 1 and files[0] == Path(entry.path).expanduser()
    made = Source(
        files=files,
        invalid_text=config.invalid_text,
        invalid=config.invalid,
        text_key=entry.text_key or config.text_key,
        prompt_key=entry.prompt_key or config.prompt_key,
        completion_key=entry.completion_key or config.completion_key,
        messages_key=entry.messages_key or config.messages_key,
        format=wanted,
        lists=wanted not in ("auto", "text") or (named and _holds_list(files[0])),
        split=entry.split,
        weight=entry.weight,
    )
    return replace(made, format=_first_format(made)) if made.format == "auto" else made


def _holds_list(file: Path) -> bool:
    """Whether a file named by itself is a ``.json`` list of records."""
    if kind_of(file, records=True) != "json":
        return False
    first = next(READERS["json"].read(Part(file, "json", 0, None), skip_invalid=True), None)
    return first is not None and isinstance(first[1], Record)


def _first_format(source: Source) -> str:
    """The format of the first record that has a known shape; ``text`` when there are no records.

    Raises:
        DataError: none of the first records has one; names the first of them.
    """
    problem: str | None = None
    for file in source.files:
        part = Part(file, kind_of(file, records=source.lists), 0, None, source.split)
        if part.kind in ("text", "megatron"):
            continue
        for position, item in islice(READERS[part.kind].read(part, skip_invalid=True), _PEEK):
            fault = item.message if isinstance(item, Fault) else ""
            if isinstance(item, Record):
                try:
                    return detect(item.values, source.keys)
                except Malformed as error:
                    fault = str(error)
            problem = problem or f"{place_of(part, position)}: {fault}"
    if problem is not None:
        raise DataError(problem)
    return "text"


def find_files(patterns: Sequence[str], name_pattern: str, key: str) -> tuple[Path, ...]:
    """The files that ``patterns`` (files, folders, globs, data sets) stand for, sorted, each once.

    Hidden files and folders below a named folder are left out.

    Raises:
        DataError: a pattern matches nothing.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if pattern.startswith(HUB) or (path.is_dir() and is_saved_dataset(path)):
            files = [Path(pattern) if pattern.startswith(HUB) else path]
        elif _megatron(path):
            files = [_index_of(path)]
        elif path.is_file():
            files = [path]
        elif path.is_dir():
            files = [file for file in sorted(path.rglob(name_pattern)) if file.is_file() and not _hidden(file, path)]
            files = [file for file in files if not (file.suffix == ".bin" and file.with_suffix(".idx").is_file())]
        else:
            files = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if not files:
            why = (
                f"holds no file named {name_pattern} (data.pattern)"
                if path.is_dir()
                else "is no file, folder, data set or glob with files"
            )
            raise DataError(f"{key}: {pattern} {why}")
        found.update(dict.fromkeys(files))
    return tuple(found)


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _megatron(path: Path) -> bool:
    idx = _index_of(path)
    return idx.is_file() and idx.with_suffix(".bin").is_file() and (path.suffix in (".bin", ".idx") or not path.exists())


def _index_of(path: Path) -> Path:
    return path.with_suffix(".idx") if path.suffix in (".bin", ".idx") else Path(f"{path}.idx")


def units_of(source: Source, unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """Cut a source into units of about ``unit_bytes``, in order: large files in parts, small files together."""
    units: list[Unit] = []
    gathered: list[Part] = []
    size = 0
    for whole in source.parts():
        for part, part_bytes in READERS[whole.kind].parts(whole, unit_bytes):
            if gathered and size + part_bytes > unit_bytes:
                units.append(tuple(gathered))
                gathered, size = [], 0
            gathered.append(part)
            size += part_bytes
    return [*units, tuple(gathered)] if gathered else units
