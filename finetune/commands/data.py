"""``tessera-finetune data check`` and ``data show``: the data of a run, without a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from finetune.commands.parser import CommandParser, add_config, require_option
from finetune.commands.tables import table_console
from finetune.config import TuneConfig
from finetune.config.load import load_config
from finetune.errors import ConfigError

if TYPE_CHECKING:
    from finetune.data.check import DataReport


def add_arguments(parser: CommandParser) -> None:
    """What the command takes."""
    parser.description = "Look at a run's data."
    what = parser.add_subparsers(dest="what", required=True, metavar="{check,show}")
    check = what.add_parser("check", help="list every faulty record; exit code 2 if one would be refused")
    check.description = "Read all data and list every faulty record; exit code 2 if one would be refused."
    add_config(check)
    check.add_argument("--limit", type=int, default=50, help="faults and warnings to list, at most (50 each); all are counted")
    check.add_argument("--json", action="store_true", help="one JSON object instead of text")
    show = what.add_parser("show", help="print a row as packed, targets told from context")
    show.description = "Print one row as the model sees it, targets told from context; prepares the data first."
    add_config(show)
    show.add_argument("--row", type=int, default=0, help="number of the row (0)")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    return _check(options) if options.what == "check" else _show(options)


def _check(options: argparse.Namespace) -> int:
    require_option(options.limit >= 1, "limit", options.limit, "be at least 1")
    config = settings_of(options)
    from finetune.data.check import check_data

    console = table_console()
    report = check_data(config, limit=options.limit, say=say(Console(stderr=True)))
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


def _show(options: argparse.Namespace) -> int:
    config = settings_of(options)
    from finetune.data.prepare import prepare as make
    from finetune.data.show import show_row

    with written(config):
        prepared = make(config, say(Console(stderr=True)))
    show_row(prepared, options.row, Console())
    return 0


# -- shared with ``prepare``


def settings_of(options: argparse.Namespace) -> TuneConfig:
    """The run's configuration, with the tokenizer where it can be read."""
    from finetune.base_model.hub import located

    return located(load_config(options.config, options.overrides), say(Console(stderr=True)), need="tokenizer")


def say(console: Console) -> Callable[[str], None]:
    """Prints what is under way, dim."""
    return lambda text: console.print(f"[dim]{escape(text)}[/]", highlight=False, soft_wrap=True)


@contextmanager
def written(config: TuneConfig) -> Iterator[None]:
    """Refuses a place that cannot be written to."""
    try:
        yield
    except OSError as error:
        key, folder = ("data.folder", config.data.folder) if config.data.folder else ("run.output", config.run.output)
        raise ConfigError(f"{key}: {folder}: the tokenised data cannot be written: {error}") from error
