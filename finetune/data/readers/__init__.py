"""Readers of data files, one for each kind of file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from checkpoint.readers.hub import HUB
from finetune.data.readers.items import Fault, Item, Part, Piece, Reader, Record, Tokens, cut
from finetune.data.readers.json_array import JsonArrayReader
from finetune.data.readers.jsonl import JsonlReader
from finetune.data.readers.megatron import MegatronReader
from finetune.data.readers.streams import inner_suffix
from finetune.data.readers.tables import DatasetReader, ParquetReader, is_saved_dataset
from finetune.data.readers.text import TextReader

__all__ = ["READERS", "Fault", "Item", "Part", "Piece", "Reader", "Record", "Tokens", "cut", "kind_of"]

READERS: Final[Mapping[str, Reader]] = {
    "text": TextReader(),
    "jsonl": JsonlReader(),
    "json": JsonArrayReader(),
    "parquet": ParquetReader(),
    "datasets": DatasetReader(),
    "megatron": MegatronReader(),
}


def kind_of(file: Path, *, records: bool) -> str:
    """Which reader opens ``file``.

    Args:
        records: whether records are expected; only then is a ``.json`` file a list of them, and text otherwise.
    """
    if str(file).startswith(HUB) or (file.is_dir() and is_saved_dataset(file)):
        return "datasets"
    suffix = inner_suffix(file)
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if suffix == ".json" and records:
        return "json"
    if file.suffix.lower() == ".parquet":
        return "parquet"
    if file.suffix == ".idx" and file.with_suffix(".bin").is_file():
        return "megatron"
    return "text"
