"""``tessera-finetune prepare``, ``data check`` and ``data show``: the data of a run, without a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from finetune.commands.tables import table_console
from finetune.config import TuneConfig
from finetune.config.read import split_overrides
from finetune.errors import ConfigError
from finetune.machine import inventory

if TYPE_CHECKING:
    from finetune.data.check import DataReport

_OVERRIDES = "Any key of the configuration can be given as an option too, as for tune: --data.seq_len 1024"


def prepare(words: list[str]) -> int:
    """Tokenise what a configuration names, in several processes, where ``tune`` will find it."""
    parser = _parser("prepare", "tokenise the data of a run ahead of it; an interrupted one goes on where it was")
    parser.add_argument("--workers", type=int, default=None, help="processes that tokenise; unset: one per usable core")
    parser.add_argument("--megatron", type=Path, metavar="PREFIX", help="also write PREFIX.bin and PREFIX.idx")
    config, options = _parsed(parser, words)
    if options.workers is not None and options.workers < 1:
        parser.error("--workers must be at least 1")
    from finetune.data.export import write_prepared
    from finetune.data.prepare import prepare as make
    from finetune.data.prepared import described

    console = Console()
    workers = options.workers or inventory.usable_cores()
    with _written(config), _Counter(console) as counter:
        prepared = make(config, _say(console), workers=workers, progress=counter.update)
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


def main(words: list[str]) -> int:
    """``data check`` or ``data show``."""
    commands = {"check": _check, "show": _show}
    parser = argparse.ArgumentParser(prog="tessera-finetune data", allow_abbrev=False, description="Look at a run's data.")
    parser.add_argument("what", choices=list(commands), help="check: list every faulty record; show: print a row as packed")
    if not words or words[0] not in commands:
        parser.parse_args(words[:1])
        return 2
    return commands[words[0]](words[1:])


def _check(words: list[str]) -> int:
    parser = _parser("data check", "read all data and list every faulty record; exit code 2 if one would be refused")
    parser.add_argument("--limit", type=int, default=50, help="faults and warnings to list, at most (50 each); all are counted")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    config, options = _parsed(parser, words)
    if options.limit < 1:
        parser.error("--limit must be at least 1")
    from finetune.data.check import check_data

    console = table_console()
    report = check_data(config, limit=options.limit, say=_say(Console(stderr=True)))
    if options.json:
        sys.stdout.write(json.dumps(asdict(report), ensure_ascii=False) + "\n")
    else:
        _print_report(report, console)
    return 2 if report.num_faults > report.num_skipped else 0


def _print_report(report: DataReport, console: Console) -> None:
    for fault in report.faults:
        console.print(f"[red]fault:[/] {escape(fault)}", highlight=False, soft_wrap=True)
    if report.num_faults > len(report.faults):
        console.print(f"… and {report.num_faults - len(report.faults):,} more (--limit)", highlight=False)
    for warning in report.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)
    if report.num_warnings > len(report.warnings):
        console.print(f"… and {report.num_warnings - len(report.warnings):,} more warnings (--limit)", highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("source", "format"):
        table.add_column(name, overflow="fold")
    for name in ("weight", "documents", "tokens", "targets", "longest"):
        table.add_column(name, justify="right")
    for source in report.sources:
        share = f"{source.targets / source.tokens:.1%}" if source.tokens else "-"
        counts = (f"{source.documents:,}", f"{source.tokens:,}", share, f"{source.longest:,}")
        table.add_row(escape(source.name), source.format, f"{source.weight:g}", *counts)
    console.print(table)
    for source in report.sources:
        if source.documents:
            console.print(f"longest of {escape(source.name)}: {escape(source.longest_place)}", highlight=False, soft_wrap=True)
        if source.dropped:
            console.print(f"{escape(source.name)}: {source.dropped:,} longer than a row (data.too_long)", highlight=False)
    rows = f"{report.rows:,} rows of {report.seq_len} tokens, {report.fill:.1%} full (data.packing: {report.packing})"
    console.print(rows, highlight=False)
    skipped = f", {report.num_skipped:,} of them left out (data.invalid: skip)" if report.num_skipped else ""
    warned = f", {report.num_warnings:,} warnings" if report.num_warnings else ""
    count = f"{report.num_faults:,}" if report.num_faults else "no"
    console.print(f"{count} faults{skipped}{warned}", highlight=False)


def _show(words: list[str]) -> int:
    parser = _parser("data show", "print one row as the model sees it, targets told from context; prepares the data first")
    parser.add_argument("--row", type=int, default=0, help="number of the row (0)")
    config, options = _parsed(parser, words)
    from finetune.data.prepare import prepare as make
    from finetune.data.show import show_row

    with _written(config):
        prepared = make(config, _say(Console(stderr=True)))
    show_row(prepared, options.row, Console())
    return 0


# -- shared


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"tessera-finetune {command}", description=description, epilog=_OVERRIDES, allow_abbrev=False
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    return parser


def _parsed(parser: argparse.ArgumentParser, words: list[str]) -> tuple[TuneConfig, argparse.Namespace]:
    from finetune.base_model.hub import located
    from finetune.config.load import load_config

    overrides, rest = split_overrides(words, [field.name for field in fields(TuneConfig)])
    options = parser.parse_args(rest)
    return located(load_config(options.config, overrides), _say(Console(stderr=True)), need="tokenizer"), options


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


def _say(console: Console):  # type: ignore[no-untyped-def]
    return lambda text: console.print(f"[dim]{escape(text)}[/]", highlight=False, soft_wrap=True)


@contextmanager
def _written(config: TuneConfig) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        key, folder = ("data.folder", config.data.folder) if config.data.folder else ("run.output", config.run.output)
        raise ConfigError(f"{key}: {folder}: the tokenised data cannot be written: {error}") from error
