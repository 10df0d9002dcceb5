"""``tessera-finetune prepare``: tokenise the data of a run in several processes, where ``tune`` will find it."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from finetune.commands.data import say, settings_of, written
from finetune.commands.parser import CommandParser, add_config, require_option
from finetune.errors import ConfigError
from finetune.machine import inventory


def add_arguments(parser: CommandParser) -> None:
    """What the command takes."""
    parser.description = "Tokenise the data of a run ahead of it; an interrupted one goes on where it was."
    add_config(parser)
    parser.add_argument("--workers", type=int, default=None, help="processes that tokenise; unset: one per usable core")
    parser.add_argument("--megatron", type=Path, metavar="PREFIX", help="also write PREFIX.bin and PREFIX.idx")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    require_option(options.workers is None or options.workers >= 1, "workers", options.workers, "be at least 1")
    config = settings_of(options)
    from finetune.data.export import write_prepared
    from finetune.data.prepare import prepare as make
    from finetune.data.prepared import described

    console = Console()
    workers = options.workers or inventory.usable_cores()
    with written(config), _Counter(console) as counter:
        prepared = make(config, say(console), workers=workers, progress=counter.update)
    console.print(
        f"{prepared.documents:,} documents; {described(prepared)}; {prepared.train_rows:,} rows of {prepared.seq_len} to train "
        f"on, {prepared.eval_rows:,} to evaluate on",
        highlight=False,
        soft_wrap=True,
    )
    if options.megatron:
        try:
            count = write_prepared(prepared, options.megatron)
        except OSError as error:
            raise ConfigError(f"--megatron: {options.megatron} cannot be written: {error}") from error
        console.print(f"{options.megatron}.bin and .idx: {count:,} documents", highlight=False, soft_wrap=True)
    return 0


class _Counter:
    """A line that counts units of work, on a terminal."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = ("tokenising", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("tokenising", total=None)

    def __enter__(self) -> _Counter:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)
