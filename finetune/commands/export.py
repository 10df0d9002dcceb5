"""``tessera-finetune export``: a checkpoint of any layout written elsewhere, in any dtype."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from finetune.commands.parser import DTYPES, CommandParser, add_given, given_of, require_option
from finetune.errors import ConfigError
from finetune.machine.process import stopped_in_order, without_collection


def add_arguments(parser: CommandParser) -> None:
    """What the command takes."""
    parser.add_argument("source", type=Path, nargs="?", metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="folder to make")
    parser.add_argument("--from", type=Path, dest="from_", metavar="PATH", help="the same as RUN_OR_CHECKPOINT")
    parser.add_argument("--to", type=Path, metavar="DIR", help="the same as OUT")
    parser.add_argument("--dtype", choices=DTYPES, help="of the written weights; unset: as stored")
    parser.add_argument("--step", type=int, help="which checkpoint of a run; unset: the latest")
    parser.add_argument("--max-shard-mib", type=int, default=2048, help="largest file of weights (2048)")
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="write one file for each of N ranks, cut for them (1: whole tensors, which transformers opens)",
    )
    add_given(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    require_option(options.max_shard_mib >= 1, "max_shard_mib", options.max_shard_mib, "be at least 1")
    ranks = options.tensor_parallel_size
    require_option(1 <= ranks <= 1024, "tensor_parallel_size", ranks, "be from 1 to 1024")
    places = [place for place in (options.from_, options.source, options.to, options.out) if place is not None]
    if len(places) != 2 or (options.from_ and options.to is None) or (options.to and options.from_ is None):
        raise ConfigError("export takes RUN_OR_CHECKPOINT and OUT, or --from and --to in their place")
    with without_collection():
        from checkpoint.dtypes import FLOAT_TYPES
        from finetune.trained.export import export

    dtype = FLOAT_TYPES[options.dtype] if options.dtype else None
    console = Console(stderr=True)
    bar = Progress(BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal)
    with stopped_in_order(), bar:
        task = bar.add_task("")
        path = export(
            places[0],
            places[1],
            dtype=dtype,
            step=options.step,
            max_shard_bytes=options.max_shard_mib << 20,
            ranks=ranks,
            given=given_of(options),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    sys.stdout.write(f"{path}\n")
    return 0
