"""``tessera-finetune inspect``: what a checkpoint is."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from finetune.commands.parser import CommandParser, add_given, given_of
from finetune.commands.tables import table_console
from finetune.machine.process import without_collection

if TYPE_CHECKING:
    from finetune.trained.inspect import Findings


def add_arguments(parser: CommandParser) -> None:
    """What the command takes."""
    parser.add_argument("path", type=Path, metavar="PATH", help="a checkpoint of any layout, or a folder above some")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--tensors", metavar="PATTERN", help="read the tensors of such names (* and ?): mean, deviation, zeros, NaN"
    )
    parser.add_argument(
        "--verify",
        choices=("structure", "sha256"),
        default="structure",
        help="sha256 also compares every byte with the manifest (structure)",
    )
    add_given(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code: 1 where something is wrong with the checkpoint."""
    with without_collection():
        from finetune.trained.inspect import inspect

    found = inspect(options.path, given=given_of(options), tensors=options.tensors, verify=options.verify)
    if options.json:
        sys.stdout.write(json.dumps(found.as_json(), indent=2, default=str) + "\n")
    else:
        _show(found)
    return 1 if found.problems else 0


def _show(found: Findings) -> None:
    console = table_console()
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "path": found.path,
        "format": found.format,
        "step": "not said" if found.step is None else found.step,
        "model": found.model_type or "no configuration found (--model-config)",
        "tensors": f"{found.tensors} in {found.files} files",
        "parameters": f"{found.parameters:,}",
        "bytes": f"{found.bytes:,}",
        "types": ", ".join(f"{dtype} {count:,}" for dtype, count in found.dtypes.items()),
        "manifest": "yes" if found.manifest else "no",
        "tokenizer": found.tokenizer or "none found (--tokenizer)",
        **found.facts,
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    console.print(table, markup=False, highlight=False)
    if found.held:
        held = Table("tensor", "type", "shape", "mean", "deviation", "zeros", "NaN", "infinite", box=None, pad_edge=False)
        for item in found.held:
            numbers = ("-" if value is None else f"{value:.4g}" for value in (item.mean, item.deviation))
            shape = str(list(item.shape)).replace("[", r"\[")
            held.add_row(item.name, item.dtype, shape, *numbers, f"{item.zeros:.2%}", str(item.nan), str(item.infinite))
        console.print(held, highlight=False)
    for problem in found.problems:
        console.print(f"wrong: {problem}", markup=False, highlight=False, soft_wrap=True)
