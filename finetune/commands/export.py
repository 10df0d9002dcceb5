"""``tessera-finetune export``: a checkpoint written elsewhere, in any dtype."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from finetune.commands.parser import DTYPES, CommandParser, require_option
from finetune.machine.process import without_collection


def add_arguments(parser: CommandParser) -> None:
    """What the command takes."""
    parser.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    parser.add_argument("--dtype", choices=DTYPES, help="of the written weights; unset: as stored")
    parser.add_argument("--step", type=int, help="which checkpoint of a run; unset: the latest")
    parser.add_argument("--max-shard-mib", type=int, default=2048, help="largest file of weights (2048)")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    require_option(options.max_shard_mib >= 1, "max_shard_mib", options.max_shard_mib, "be at least 1")
    with without_collection():
        from checkpoint.dtypes import FLOAT_TYPES
        from finetune.trained.export import export

    dtype = FLOAT_TYPES[options.dtype] if options.dtype else None
    path = export(options.source, options.out, dtype=dtype, step=options.step, max_shard_bytes=options.max_shard_mib << 20)
    sys.stdout.write(f"{path}\n")
    return 0
