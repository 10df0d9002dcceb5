"""``tessera-finetune merge``: a LoRA adapter joined with its base model."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from finetune.commands.parser import DTYPES, CommandParser, add_given, given_of, require_option
from finetune.machine.process import stopped_in_order, without_collection


def add_arguments(parser: CommandParser) -> None:
    """What the command takes."""
    parser.add_argument("adapter", type=Path, metavar="RUN_OR_ADAPTER")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    parser.add_argument("--dtype", choices=DTYPES, help="of the written weights; unset: the base model's")
    parser.add_argument("--max-shard-mib", type=int, default=2048, help="largest file of weights (2048)")
    add_given(parser, adapter=False)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    require_option(options.max_shard_mib >= 1, "max_shard_mib", options.max_shard_mib, "be at least 1")
    with without_collection():
        from checkpoint.dtypes import FLOAT_TYPES
        from finetune.trained.merge import merge

    dtype = None if options.dtype is None else FLOAT_TYPES[options.dtype]
    with stopped_in_order():
        out = merge(
            options.adapter,
            options.out,
            given=replace(given_of(options), adapter=None),
            dtype=dtype,
            max_shard_bytes=options.max_shard_mib << 20,
        )
    Console().print(str(out), highlight=False, soft_wrap=True)
    return 0
