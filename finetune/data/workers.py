"""Units of a source to shards, in this process or in several; a shard that is there is not made again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path

from finetune.data.chat import ChatTargets
from finetune.data.encode import Encoded, Encoder
from finetune.data.readers import Fault, Piece, Record, Tokens, cut
from finetune.data.samples import Chat, Completion, Malformed, Text, parse
from finetune.data.shards import ShardWriter, is_shard
from finetune.data.sources import Source, Unit, place_of, read_part
from finetune.data.tokenizer import end_of_text_id, open_tokenizer
from finetune.errors import DataError, RunError
from finetune.machine.process import die_with_parent

_BATCH_CHARACTERS = 4 << 20
_PARENT_LOOKS_EVERY_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How the samples of a run become tokens: all an encoder is made of."""

    tokenizer: Path
    template: str | None
    template_place: str
    now: str
    """ISO date and time that templates are told."""
    train_on: str
    roles: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitJob:
    """One unit to tokenise, and where its shard goes."""

    encoding: Encoding
    source: Source
    unit: Unit
    folder: Path


@lru_cache(maxsize=4)
def encoder_of(encoding: Encoding) -> tuple[Encoder, str]:
    """The encoder, and the dtype its ids are stored in."""
    tokenizer = open_tokenizer(encoding.tokenizer)
    end_id = end_of_text_id(encoding.tokenizer, tokenizer)
    template = None
    if encoding.template is not None:
        now, place = datetime.fromisoformat(encoding.now), encoding.template_place
        template = ChatTargets(encoding.template, tokenizer.special_tokens, tokenizer.special_texts, now, place)
    dtype = "uint16" if tokenizer.num_ids <= 1 << 16 else "uint32"
    return Encoder(tokenizer, end_id, template, encoding.train_on, encoding.roles), dtype


def encoded_items(
    encoder: Encoder,
    source: Source,
    unit: Unit,
    check: Callable[[], None] = lambda: None,
    *,
    see: Callable[[int, int, Chat], None] = lambda part, position, chat: None,
) -> Iterator[tuple[int, int, Encoded | Fault]]:
    """Everything in a unit, encoded: part, position and tokens, or what is wrong there.

    Args:
        check: may raise to end it.
        see: is shown each conversation and where it is from, before it is encoded.
    """
    waiting: list[tuple[int, int, Piece | Tokens | Chat | Completion | Fault]] = []
    size = 0
    for part, position, item in _samples(source, unit):
        if isinstance(item, Chat):
            see(part, position, item)
        waiting.append((part, position, item))
        size += _characters(item)
        if size >= _BATCH_CHARACTERS:
            check()
            yield from _encoded(encoder, waiting)
            waiting, size = [], 0
    check()
    yield from _encoded(encoder, waiting)


def _characters(item: Piece | Tokens | Chat | Completion | Fault) -> int:
    """About how much memory an item asks for."""
    if isinstance(item, Piece):
        return len(item.text)
    if isinstance(item, Completion):
        return len(item.prompt) + len(item.completion)
    if isinstance(item, Chat):
        return sum(len(message["content"]) for message in item.messages)
    return len(item.ids) if isinstance(item, Tokens) else len(item.message)


def _samples(source: Source, unit: Unit) -> Iterator[tuple[int, int, Piece | Tokens | Chat | Completion | Fault]]:
    for number, part in enumerate(unit):
        for position, item in read_part(part, source):
            if not isinstance(item, Record):
                yield number, position, item
                continue
            try:
                sample = parse(item.values, source.format, source.keys)
            except Malformed as error:
                yield number, position, Fault(str(error))
                continue
            if isinstance(sample, Text):
                for piece in cut(sample.text):
                    yield number, position, piece
            else:
                yield number, position, sample


def _encoded(
    encoder: Encoder, waiting: Sequence[tuple[int, int, Piece | Tokens | Chat | Completion | Fault]]
) -> Iterator[tuple[int, int, Encoded | Fault]]:
    encoded = iter(encoder.encode([item for _, _, item in waiting if not isinstance(item, Fault)]))
    for part, position, item in waiting:
        yield part, position, item if isinstance(item, Fault) else next(encoded)


def make_shard(job: UnitJob, check: Callable[[], None] = lambda: None) -> None:
    """Tokenise one unit.

    Raises:
        DataError: names the first record at fault, unless the source skips those.
    """
    encoder, dtype = encoder_of(job.encoding)
    with ShardWriter(job.folder, dtype, masked=job.source.masked, unit=job.unit) as shard:
        for part, position, item in encoded_items(encoder, job.source, job.unit, check):
            if not isinstance(item, Fault):
                shard.add(part, position, item)
            elif job.source.invalid == "skip":
                shard.leave_out(part, position, item.message)
            else:
                remedy = "tessera-finetune data check lists every such place; data.invalid: skip leaves them out"
                raise DataError(f"{place_of(job.unit[part], position)}: {item.message} ({remedy})")


def make_shards(
    jobs: Sequence[UnitJob], *, workers: int, check: Callable[[], None], progress: Callable[[int, int], None]
) -> None:
    """Make the shards that are missing.

    Args:
        workers: processes; 1 works in this one, where the tokenizer's own threads use all cores.
        check: called often; what it raises ends the work.
        progress: told how many of the missing shards are made, and how many there are.

    Raises:
        DataError: names the first record at fault that was found.
    """
    # Sources that hold the same have one folder of shards.
    missing = [job for job in {job.folder: job for job in jobs}.values() if not is_shard(job.folder)]
    if workers <= 1 or len(missing) <= 1:
        for made, job in enumerate(missing, 1):
            check()
            make_shard(job, check)
            progress(made, len(missing))
        return
    environment: Mapping[str, str] = {"TOKENIZERS_PARALLELISM": "false"}
    context = get_context("spawn")
    stop = context.Event()
    start = (os.getpid(), environment, stop)
    with ProcessPoolExecutor(min(workers, len(missing)), mp_context=context, initializer=_start_worker, initargs=start) as pool:
        running = {pool.submit(_work, job) for job in missing}
        try:
            while running:
                check()
                done, running = wait(running, timeout=_PARENT_LOOKS_EVERY_SECONDS, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                progress(len(missing) - len(running), len(missing))
        except BrokenProcessPool as error:
            raise RunError(
                "a process that tokenises was killed, perhaps because memory ran out; try fewer --workers"
            ) from error
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


_stop: Event | None = None
"""In a worker process: set once its work is no longer wanted."""


def _start_worker(parent: int, environment: Mapping[str, str], stop: Event) -> None:
    global _stop
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the one that started them decides
    os.environ.update(environment)
    _stop = stop


def _work(job: UnitJob) -> None:
    make_shard(job, _check_wanted)


def _check_wanted() -> None:
    if _stop is not None and _stop.is_set():
        raise RunError("stopped")
