"""Text to rows ready to train on: found again by fingerprint, tokenised once, laid out for this run.

Below ``data.folder`` (or ``<run.output>/data``): ``tokenizers/``, one folder each; ``tokens/``, the shards of each source; and
``layouts/``, which documents train, which evaluate, and how they share rows. Another weight, split or packing makes a new
layout of the same tokens.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from finetune.config import TuneConfig
from finetune.data.inputs import Inputs, digest, find_inputs, nothing_in, source_identity
from finetune.data.layout import Layout, Settings, lay_out
from finetune.data.made_of import MadeOf, source_record
from finetune.data.prepared import LAYOUTS, TOKENIZERS, TOKENS, Prepared
from finetune.data.settings import Say, files_digest, prepare_encoding
from finetune.data.shards import LEFT_OUT, facts_of, name_unit
from finetune.data.sources import UNIT_BYTES, Source, Unit, units_of
from finetune.data.tokenizer import end_of_text_id, open_tokenizer
from finetune.data.workers import Encoding, UnitJob, make_shards
from finetune.errors import DataError

__all__ = ["Prepared", "prepare"]

_FACTS = "prepared.json"
_LOOK_EVERY_SECONDS = 0.5


def prepare(
    config: TuneConfig,
    say: Say,
    check: Callable[[], None] = lambda: None,
    *,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
    kept_tokenizer: Path | None = None,
    of_model: bool = True,
) -> Prepared:
    """Tokenise the data of a run, or find it done already.

    Args:
        say: told what takes time.
        check: called every so often; what it raises ends the work.
        workers: processes that tokenise; the result does not depend on it.
        progress: told how many units of work are done, and how many there are.
        kept_tokenizer: folder of the tokenizer to take instead of learning one (``tokenizer.train``).
        of_model: see ``prepare_encoding``.

    Raises:
        DataError: a text is at fault, or there is less than one row of it.
        ConfigError: the tokenizer or the chat template is at fault.
    """
    inputs = find_inputs(config)
    check()
    root = data_folder(config)
    with _held(root, say, check):
        encoding = prepare_encoding(
            config,
            inputs,
            root / TOKENIZERS,
            say,
            kept=kept_tokenizer,
            skip_faults=config.data.invalid == "skip",
            of_model=of_model,
        )
        made = _prepare(config, inputs, encoding, root, say, check, workers=workers, progress=progress)
        return replace(made, of_model=of_model)


def data_folder(config: TuneConfig) -> Path:
    """Where the tokenised data of a run are kept."""
    return Path(config.data.folder).expanduser() if config.data.folder else Path(config.run.output) / "data"


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
    encoding: Encoding,
    root: Path,
    say: Say,
    check: Callable[[], None],
    *,
    workers: int,
    progress: Callable[[int, int], None],
) -> Prepared:
    jobs = [list(_jobs(source, encoding, root / TOKENS)) for source in inputs.sources]
    missing = [job for job in _flat(jobs) if not job.folder.is_dir()]
    if missing:
        units = "unit" if len(missing) == 1 else "units"
        say(f"tokenising {sum(len(source.files) for source in inputs.sources)} files in {len(missing)} {units} of work")
    make_shards(list(_flat(jobs)), workers=workers, check=check, progress=progress)
    for job in _flat(jobs):
        name_unit(job.folder, job.unit)
    for source, some in zip(inputs.sources, jobs, strict=True):
        if not any(facts_of(job.folder).documents for job in some):
            raise DataError(nothing_in(source))
    return _laid_out(config, inputs, encoding, jobs, root / LAYOUTS, say)


def _flat(jobs: Iterable[Sequence[UnitJob]]) -> Iterator[UnitJob]:
    for some in jobs:
        yield from some


# -- tokens


def _jobs(source: Source, encoding: Encoding, root: Path) -> Iterator[UnitJob]:
    """The units of a source, each with the folder of its shard."""
    template = [encoding.template, encoding.train_on, encoding.roles] if source.masked else None
    folder = root / digest(source_identity(source), files_digest(encoding.tokenizer), template, UNIT_BYTES)
    units: list[Unit] = units_of(source, UNIT_BYTES)
    now = _kept_time(folder, encoding.now)
    kept = replace(encoding, now=now)
    for number, unit in enumerate(units):
        yield UnitJob(encoding=kept, source=source, unit=unit, folder=folder / f"{number:05d}")


def _kept_time(folder: Path, now: str) -> str:
    """When the work on these tokens began: work that goes on later tells templates the same date."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob("tmp-*"):
        if leftover.is_file():
            leftover.unlink()
        shutil.rmtree(leftover, ignore_errors=True)
    file = folder / "began"
    if not file.is_file() or not file.stat().st_size:  # a full disk may leave a file without what was to be in it
        work = folder / f"tmp-began-{os.getpid()}"
        work.write_text(now, encoding="utf-8")
        work.rename(file)
    return file.read_text(encoding="utf-8")


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
    made_of = MadeOf(
        names=tuple(names),
        weights=tuple(weights),
        num_train=len(inputs.train),
        settings=asdict(settings),
        tokenizer=files_digest(encoding.tokenizer),
        targets={"train_on": encoding.train_on, "train_roles": list(encoding.roles)},
        sources=tuple(source_record(source) for source in inputs.sources),
    )
    fingerprint = made_of.fingerprint
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
            _list_left_out(folders, work / LEFT_OUT)
            (work / _FACTS).write_text(json.dumps(_facts(encoding, inputs, folders, layout), indent=2) + "\n", encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    made_of.write(folder)
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
    if prepared.left_out:
        listed = Path(prepared.folder) / LEFT_OUT
        say(f"left out {prepared.left_out:,} records that cannot be used (data.invalid: skip); they are listed in {listed}")
    if prepared.dropped:
        say(f"left out {prepared.dropped:,} samples of more than {data.seq_len} tokens (data.too_long: {data.too_long})")
    return prepared


def _list_left_out(folders: Sequence[Sequence[Path]], path: Path) -> None:
    """Join the shards' lists; no file where nothing was left out."""
    lists = [shard / LEFT_OUT for some in folders for shard in some if (shard / LEFT_OUT).is_file()]
    if not lists:
        return
    with path.open("wb") as out:
        for file in lists:
            out.write(file.read_bytes())


def _facts(encoding: Encoding, inputs: Inputs, folders: Sequence[Sequence[Path]], layout: Layout) -> dict[str, object]:
    tokenizer = open_tokenizer(encoding.tokenizer)
    ids, end_id = tokenizer.num_ids, end_of_text_id(encoding.tokenizer, tokenizer)
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
        "left_out": sum(shard.left_out for shard in shards),
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
