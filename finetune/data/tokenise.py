"""Text to rows ready to train on: found again by fingerprint, tokenised once, laid out for this run.

Below ``data.folder`` (or ``<run.output>/data``): ``tokenizers/``, one folder each; ``tokens/``, the shards of each source; and
``layouts/``, which documents train, which evaluate, and how they share rows. Another weight, split or packing makes a new
layout of the same tokens.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from finetune.config import TuneConfig
from finetune.data.chat import find_template
from finetune.data.layout import Layout, Settings, lay_out
from finetune.data.readers.tables import open_dataset
from finetune.data.shards import facts_of
from finetune.data.sources import UNIT_BYTES, Piece, Source, Unit, source_of, units_of
from finetune.data.tokenizer import (
    CHAT_TEMPLATE,
    copy_tokenizer,
    end_of_text_id,
    num_ids,
    open_tokenizer,
    train_tokenizer,
)
from finetune.data.work import Encoding, UnitJob, make_shards
from finetune.errors import ConfigError, DataError

Say = Callable[[str], None]
_FORMAT_VERSION = 2
_FACTS = "prepared.json"
_LOOK_EVERY_SECONDS = 0.5
_NO_TEMPLATE = (
    "data.chat_template is not set; the data holds conversations and the tokenizer has no template for them: "
    "name a Jinja file, or one of chatml, plain, instruct"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Rows ready to train on; ``finetune.data.rows.open_rows`` opens them."""

    folder: str
    """Holds the layout; see ``finetune.data.layout``."""
    tokenizer: str
    """Folder of the tokenizer, with the chat template of the run."""
    shards: tuple[str, ...]
    """Folders of the tokens, in the order the layout counts them."""
    num_train_shards: int
    """How many of them, from the first on, are of the training sources."""
    dtype: str
    fingerprint: str
    """Of all the rows depend on: files, formats, tokenizer, template, split, packing. A resumed run must meet the same."""
    num_ids: int
    end_of_text_id: int
    stop_ids: tuple[int, ...]
    """Special tokens that end the model's turns, where they are not the end-of-text token."""
    packing: str
    """``join``, ``isolate`` or ``none``: decided."""
    seq_len: int
    train_tokens: int
    train_rows: int
    eval_tokens: int
    eval_rows: int
    documents: int
    """Of the training sources, before the split and weights."""
    tokens: int
    """Of these documents."""
    targets: int
    """Those of the tokens that are targets."""
    dropped: int
    """Samples left out because they were too long."""
    text_bytes: int

    @property
    def tokenizer_folder(self) -> Path:
        return Path(self.tokenizer)

    @property
    def train_shards(self) -> tuple[str, ...]:
        return self.shards[: self.num_train_shards]


def described(prepared: Prepared) -> str:
    """The data of a run in a few words, for its introduction."""
    how = {"join": "joined", "isolate": "packed, each sample by itself", "none": "one sample a row"}[prepared.packing]
    share = prepared.targets / max(1, prepared.tokens)
    targets = "" if prepared.targets == prepared.tokens else f", {share:.0%} of them targets (tessera-finetune data show)"
    return f"{prepared.train_tokens:,} tokens {how}{targets}"


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


def prepare(
    config: TuneConfig,
    say: Say,
    check: Callable[[], None] = lambda: None,
    *,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Prepared:
    """Tokenise the data of a run, or find it done already.

    Args:
        say: told what takes time.
        check: called every so often; what it raises ends the work.
        workers: processes that tokenise; the result does not depend on it.
        progress: told how many units of work are done, and how many there are.

    Raises:
        DataError: a text is at fault, or there is less than one row of it.
        ConfigError: the tokenizer or the chat template is at fault.
    """
    inputs = find_inputs(config)
    check()
    root = Path(config.data.folder).expanduser() if config.data.folder else Path(config.run.output) / "data"
    with _held(root, say, check):
        return _prepare(config, inputs, root, say, check, workers=workers, progress=progress)


@contextmanager
def _held(root: Path, say: Say, check: Callable[[], None]) -> Iterator[None]:
    """Wait until no other process prepares data in ``root``, then keep others waiting."""
    root.mkdir(parents=True, exist_ok=True)
    told = False
    with (root / ".lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    say(f"waiting for another process that prepares data in {root}")
                told = True
                check()
                time.sleep(_LOOK_EVERY_SECONDS)
        yield


def _prepare(
    config: TuneConfig,
    inputs: Inputs,
    root: Path,
    say: Say,
    check: Callable[[], None],
    *,
    workers: int,
    progress: Callable[[int, int], None],
) -> Prepared:
    encoding = prepare_encoding(config, inputs, root / "tokenizers", say)
    jobs = [list(_jobs(source, encoding, root / "tokens")) for source in inputs.sources]
    missing = [job for job in _flat(jobs) if not job.folder.is_dir()]
    if missing:
        units = "unit" if len(missing) == 1 else "units"
        say(f"tokenising {sum(len(source.files) for source in inputs.sources)} files in {len(missing)} {units} of work")
    make_shards(list(_flat(jobs)), workers=workers, check=check, progress=progress)
    for source, some in zip(inputs.sources, jobs, strict=True):
        if not any(facts_of(job.folder).documents for job in some):
            raise DataError(nothing_in(source))
    return _laid_out(config, inputs, encoding, jobs, root / "layouts", say)


def nothing_in(source: Source) -> str:
    """What is said of a source without a document."""
    more = f" and {len(source.files) - 1} more files" if len(source.files) > 1 else ""
    return f"{source.files[0]}{more}: no document in it: it is empty; leave it out of the data, or give the file that was meant"


def _flat(jobs: Iterable[Sequence[UnitJob]]) -> Iterator[UnitJob]:
    for some in jobs:
        yield from some


# -- tokenizer and template


def prepare_encoding(config: TuneConfig, inputs: Inputs, root: Path, say: Say, *, skip_faults: bool = False) -> Encoding:
    """The tokenizer and the chat template of a run, in a folder of their own below ``root``.

    Args:
        skip_faults: learn a tokenizer from what can be read, and leave faults to who reads next.

    Raises:
        ConfigError: one of them is at fault, or a conversation has no template.
    """
    named = config.data.chat_template
    given = find_template(named, root) if named else None
    conversations = any(source.format in ("alpaca", "sharegpt", "messages") for source in inputs.sources)
    if conversations and given is None and config.tokenizer.train is not None:
        raise ConfigError(_NO_TEMPLATE)  # a new tokenizer brings none: said before it is learned
    fingerprint = _digest(_tokenizer_identity(config, inputs), given[0] if given else None)
    folder = root / fingerprint
    if not (folder / "tokenizer.json").is_file():
        work = root / f"tmp-{fingerprint}-{os.getpid()}"
        try:
            if config.tokenizer.train is not None:
                files = sum(len(source.files) for source in inputs.train)
                say(f"learning a tokenizer of {config.tokenizer.train.vocab_size} ids from {files} files")
                pieces = (piece for source in inputs.train for piece in source.pieces(skip_faults=skip_faults))
                train_tokenizer(pieces, config.tokenizer.train, work)
            else:
                source, key = _tokenizer_source(config)
                copy_tokenizer(source, work, key)
            if given:
                (work / CHAT_TEMPLATE).write_text(given[0], encoding="utf-8")
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    template = given or find_template(None, folder)
    if template is None and conversations:
        raise ConfigError(_NO_TEMPLATE)
    return Encoding(
        tokenizer=folder,
        template=template[0] if template else None,
        template_place=template[1] if template else "",
        now=datetime.now().isoformat(timespec="seconds"),
        train_on=config.data.train_on,
        roles=config.data.train_roles,
    )


def _tokenizer_identity(config: TuneConfig, inputs: Inputs) -> object:
    if config.tokenizer.train is not None:
        return [asdict(config.tokenizer.train), [_source_identity(source) for source in inputs.train]]
    folder = _tokenizer_source(config)[0]
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", CHAT_TEMPLATE)
    files = [folder / name for name in names if (folder / name).is_file()]
    return [str(folder), [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]]


def _tokenizer_source(config: TuneConfig) -> tuple[Path, str]:
    if config.tokenizer.path is not None:
        return Path(config.tokenizer.path).expanduser(), "tokenizer.path"
    assert config.model.path is not None, "TuneConfig refuses a new model without a tokenizer"
    from checkpoint import resolve_latest

    path = Path(config.model.path).expanduser()
    if not (path / "config.json").is_file() and path.is_dir():
        path = resolve_latest(path)
    return path, "model.path"


# -- tokens


def _jobs(source: Source, encoding: Encoding, root: Path) -> Iterator[UnitJob]:
    """The units of a source, each with the folder of its shard."""
    template = [encoding.template, encoding.train_on, encoding.roles] if source.masked else None
    folder = root / _digest(_source_identity(source), encoding.tokenizer.name, template, UNIT_BYTES)
    units: list[Unit] = units_of(source, UNIT_BYTES)
    now = _kept_time(folder, encoding.now)
    kept = replace(encoding, now=now)
    for number, unit in enumerate(units):
        yield UnitJob(encoding=kept, source=source, unit=unit, folder=folder / f"{number:05d}")


def _kept_time(folder: Path, now: str) -> str:
    """When the work on these tokens began: work that goes on later tells templates the same date."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob("tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    file = folder / "began"
    if not file.is_file():
        file.write_text(now, encoding="utf-8")
    return file.read_text(encoding="utf-8")


def _source_identity(source: Source) -> object:
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
    return [files, source.invalid_text, source.format, source.lists, source.split, keys]


def _digest(*values: object) -> str:
    return hashlib.sha256(json.dumps([_FORMAT_VERSION, *values]).encode()).hexdigest()[:16]


# -- the layout


def _laid_out(
    config: TuneConfig, inputs: Inputs, encoding: Encoding, jobs: Sequence[Sequence[UnitJob]], root: Path, say: Say
) -> Prepared:
    data = config.data
    settings = Settings(
        seq_len=data.seq_len,
        packing=inputs.packing,
        too_long=data.too_long,
        seed=data.seed,
        eval_fraction=data.eval_fraction,
    )
    weights = [source.weight for source in inputs.sources]
    names = [job[0].folder.parent.name if job else "" for job in jobs]
    fingerprint = _digest(names, weights, len(inputs.train), asdict(settings))
    folder = root / fingerprint
    if not (folder / _FACTS).is_file():
        work = root / f"tmp-{fingerprint}-{os.getpid()}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            folders = [[job.folder for job in some] for some in jobs]
            cuttable = [not source.masked for source in inputs.sources]
            count = len(inputs.train)
            layout = lay_out(folders[:count], folders[count:], weights, cuttable, settings, work)
            (work / _FACTS).write_text(json.dumps(_facts(encoding, inputs, folders, layout), indent=2) + "\n", encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    prepared = Prepared(
        **{**facts, "stop_ids": tuple(facts["stop_ids"])},
        folder=str(folder),
        tokenizer=str(encoding.tokenizer),
        shards=tuple(str(job.folder) for job in _flat(jobs)),
        num_train_shards=sum(len(some) for some in jobs[: len(inputs.train)]),
        fingerprint=fingerprint,
        packing=inputs.packing,
        seq_len=data.seq_len,
    )
    _check_enough(prepared, bool(data.eval))
    if prepared.dropped:
        say(f"left out {prepared.dropped:,} samples of more than {data.seq_len} tokens (data.too_long: {data.too_long})")
    return prepared


def _facts(encoding: Encoding, inputs: Inputs, folders: Sequence[Sequence[Path]], layout: Layout) -> dict[str, object]:
    tokenizer = open_tokenizer(encoding.tokenizer)
    ids, end_id = num_ids(tokenizer), end_of_text_id(encoding.tokenizer, tokenizer)
    shards = [facts_of(folder) for some in folders for folder in some]
    training = [facts_of(folder) for some in folders[: len(inputs.train)] for folder in some]
    return {
        "dtype": "uint16" if ids <= 1 << 16 else "uint32",
        "num_ids": ids,
        "end_of_text_id": end_id,
        "stop_ids": sorted({stop for shard in shards for stop in shard.stop_ids} - {end_id}),
        "documents": sum(shard.documents for shard in training),
        "tokens": sum(shard.tokens for shard in training),
        "targets": sum(shard.targets for shard in training),
        "text_bytes": sum(shard.text_bytes for shard in training),
        **asdict(layout),
    }


def _check_enough(prepared: Prepared, own_eval: bool) -> None:
    for name, tokens, rows, needed in (
        ("training", prepared.train_tokens, prepared.train_rows, True),
        ("evaluation", prepared.eval_tokens, prepared.eval_rows, own_eval),
    ):
        if rows == 0 and needed:
            if prepared.packing == "join":
                what = f"the {name} text has {tokens} tokens, and a sample needs one more"
            else:
                what = f"the {name} data has no sample left" + (" once too long ones are dropped" if prepared.dropped else "")
            raise DataError(f"data.seq_len is {prepared.seq_len}; {what}; give more data, or change data.seq_len")


# -- one file of tokens, for evaluation


def write_stream(
    tokenizer: Tokenizer, pieces: Iterator[Piece], path: Path, dtype: str, end_id: int
) -> tuple[NDArray[np.int64], int]:
    """Write all documents, each ended by ``end_id``, to ``path``; return each one's tokens, and the bytes of text."""
    lengths = array("q")
    text_bytes = unfinished = 0
    with path.open("wb") as out:
        for batch in _batches(pieces):
            encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
            for piece, encoding in zip(batch, encodings, strict=True):
                ids = encoding.ids + ([end_id] if piece.ends_document else [])
                out.write(np.asarray(ids, dtype=dtype).tobytes())
                text_bytes += len(piece.text.encode("utf-8"))
                unfinished += len(ids)
                if piece.ends_document:
                    lengths.append(unfinished)
                    unfinished = 0
    return np.asarray(lengths, dtype=np.int64), text_bytes


_BATCH_CHARACTERS = 8 << 20


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Groups of pieces of about eight megabytes: enough to keep all cores of the tokenizer busy, never the whole data."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
