"""Text to token files: once per data set and tokenizer, kept in the run's folder and found again by a fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tokenizers import Tokenizer

from finetune.config import TuneConfig
from finetune.data.sources import Piece, Source, find_files
from finetune.data.tokenizer import copy_tokenizer, end_of_text_id, num_ids, open_tokenizer, train_tokenizer
from finetune.errors import DataError

Say = Callable[[str], None]
_BATCH_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Token files ready to train on."""

    folder: str
    """Holds ``train.bin``, ``eval.bin`` and ``tokenizer/``."""
    dtype: str
    fingerprint: str
    """Of the files, the tokenizer's configuration and the split; a resumed run must meet the same."""
    num_ids: int
    end_of_text_id: int
    train_tokens: int
    eval_tokens: int
    documents: int
    text_bytes: int

    @property
    def tokenizer_folder(self) -> Path:
        return Path(self.folder) / "tokenizer"


def prepare(config: TuneConfig, say: Say, check: Callable[[], None] = lambda: None) -> Prepared:
    """Tokenise the data of a run, or find it done already.

    Args:
        say: told what takes time.
        check: called every so often; what it raises ends the work.

    Raises:
        DataError: a text is at fault, or there is less than one sample of it.
        ConfigError: the tokenizer is at fault.
    """
    data = config.data
    train = _source(config, data.train, "data.train", check)
    held_out = _source(config, data.eval, "data.eval", check) if data.eval else None
    fingerprint = _fingerprint(config, train, held_out)
    folder = Path(config.run.output) / "data" / fingerprint
    facts = folder / "prepared.json"
    if not facts.is_file():
        work = folder.with_name(f"{fingerprint}.tmp-{os.getpid()}")
        work.mkdir(parents=True)
        try:
            facts_of_work = _tokenise(config, train, held_out, work, say) | {"fingerprint": fingerprint}
            (work / "prepared.json").write_text(json.dumps(facts_of_work, indent=2) + "\n", encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    prepared = Prepared(folder=str(folder), **json.loads(facts.read_text(encoding="utf-8")))
    for name, tokens, needed in (("training", prepared.train_tokens, True), ("evaluation", prepared.eval_tokens, False)):
        if tokens <= data.seq_len and (needed or (tokens > 0 and data.eval)):
            raise DataError(f"data.seq_len is {data.seq_len}; the {name} text has {tokens} tokens, and a sample needs one more")
    return prepared


def _source(config: TuneConfig, patterns: tuple[str, ...], key: str, check: Callable[[], None]) -> Source:
    files = find_files(patterns, config.data.pattern, key)
    return Source(files=files, text_key=config.data.text_key, invalid_text=config.data.invalid_text, check=check)


def _fingerprint(config: TuneConfig, *sources: Source | None) -> str:
    """Hash of everything the token files depend on: names, sizes and times of the text, the tokenizer, the split."""
    digest = hashlib.sha256()
    data = config.data
    for source in sources:
        for file in source.files if source else ():
            status = file.stat()
            digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        digest.update(b"--\n")
    settings = [data.text_key, data.invalid_text, data.eval_fraction, data.seed, bool(data.eval)]
    tokenizer: object = asdict(config.tokenizer.train) if config.tokenizer.train else None
    if tokenizer is None:
        file = _tokenizer_source(config)[0] / "tokenizer.json"
        tokenizer = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else str(file)
    digest.update(json.dumps([1, settings, tokenizer]).encode())
    return digest.hexdigest()[:16]


def _tokenizer_source(config: TuneConfig) -> tuple[Path, str]:
    if config.tokenizer.path is not None:
        return Path(config.tokenizer.path).expanduser(), "tokenizer.path"
    assert config.model.path is not None, "TuneConfig refuses a new model without a tokenizer"
    from checkpoint import resolve_latest

    path = Path(config.model.path).expanduser()
    if not (path / "config.json").is_file() and path.is_dir():
        path = resolve_latest(path)
    return path, "model.path"


def _tokenise(config: TuneConfig, train: Source, held_out: Source | None, folder: Path, say: Say) -> dict[str, object]:
    """Write the tokenizer and the token files of ``folder``; return the facts of ``Prepared``."""
    tokenizer_folder = folder / "tokenizer"
    if config.tokenizer.train is not None:
        say(f"learning a tokenizer of {config.tokenizer.train.vocab_size} ids from {len(train.files)} files")
        train_tokenizer(train.pieces(), config.tokenizer.train, tokenizer_folder)
    else:
        copy_tokenizer(*_with_target(config, tokenizer_folder))
    tokenizer = open_tokenizer(tokenizer_folder)
    ids = num_ids(tokenizer)
    dtype = "uint16" if ids <= 1 << 16 else "uint32"
    end_id = end_of_text_id(tokenizer_folder, tokenizer)

    say(f"tokenising {len(train.files) + len(held_out.files if held_out else ())} files")
    stream = folder / "stream.bin"
    lengths, text_bytes = write_stream(tokenizer, train.pieces(), stream, dtype, end_id)
    if held_out is None:
        seed, fraction = config.data.seed, config.data.eval_fraction
        counts = _split(stream, dtype, lengths, fraction, seed, config.data.seq_len, folder)
        stream.unlink()
    else:
        stream.rename(folder / "train.bin")
        eval_lengths, _ = write_stream(tokenizer, held_out.pieces(), folder / "eval.bin", dtype, end_id)
        counts = (int(lengths.sum()), int(eval_lengths.sum()))
    return {
        "dtype": dtype,
        "num_ids": ids,
        "end_of_text_id": end_id,
        "train_tokens": counts[0],
        "eval_tokens": counts[1],
        "documents": len(lengths),
        "text_bytes": text_bytes,
    }


def _with_target(config: TuneConfig, folder: Path) -> tuple[Path, Path, str]:
    source, key = _tokenizer_source(config)
    return source, folder, key


def write_stream(
    tokenizer: Tokenizer, pieces: Iterator[Piece], path: Path, dtype: str, end_id: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], int]:
    """Write all documents, each ended by ``end_id``, to ``path``; return each one's tokens, and the bytes of text."""
    lengths: list[int] = []
    text_bytes = unfinished = 0
    with path.open("wb") as out:
        for batch in _batches(pieces):
            encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
            for piece, encoding in zip(batch, encodings, strict=True):
                ids = encoding.ids + ([end_id] if piece.ends_document else [])
                _write_ids(out, ids, dtype)
                text_bytes += len(piece.text.encode("utf-8"))
                unfinished += len(ids)
                if piece.ends_document:
                    lengths.append(unfinished)
                    unfinished = 0
    return np.asarray(lengths, dtype=np.int64), text_bytes


def _write_ids(out: BinaryIO, ids: list[int], dtype: str) -> None:
    out.write(np.asarray(ids, dtype=dtype).tobytes())


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Groups of pieces of about eight megabytes: enough to keep all cores of the tokenizer busy, never the whole data."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _split(
    stream: Path,
    dtype: str,
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
    fraction: float,
    seed: int,
    seq_len: int,
    folder: Path,
) -> tuple[int, int]:
    """Divide the documents into ``train.bin`` and ``eval.bin``; return the tokens of each.

    Whole documents are held out, in an order drawn by ``seed``, until ``fraction`` of all tokens is reached; the
    document that would go beyond it is cut, its head trains and its tail evaluates, so one single file is split too.
    At least one sample is held out, when the data has two.
    """
    total = int(lengths.sum())
    wanted = 0 if fraction == 0.0 else max(round(fraction * total), seq_len + 1)
    if wanted > total - (seq_len + 1):
        wanted = 0
    ends = np.cumsum(lengths)
    held_from = ends.copy()  # first held-out token of each document: none, all, or a tail
    missing = wanted
    for index in np.random.Generator(np.random.PCG64([seed, 1])).permutation(len(lengths)):
        if missing <= 0:
            break
        take = min(missing, int(lengths[index]))
        held_from[index] = ends[index] - take
        missing -= take
    tokens = np.memmap(stream, dtype=np.dtype(dtype), mode="r") if total else np.zeros(0, dtype)
    with (folder / "train.bin").open("wb") as train, (folder / "eval.bin").open("wb") as held_out:
        for start, cut, end in zip(ends - lengths, held_from, ends, strict=True):
            train.write(tokens[start:cut].tobytes())
            held_out.write(tokens[cut:end].tobytes())
    return total - wanted, wanted
