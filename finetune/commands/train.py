"""``tessera-finetune tune`` and ``pretrain``: from a file to ranks that train, and what becomes of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import yaml
from rich.console import Console

from finetune.commands.parser import CommandParser, add_config
from finetune.config.learning_rate import with_rate
from finetune.config.load import load_config


def add_arguments(parser: CommandParser) -> None:
    """What either command takes."""
    add_config(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the newest save; short for --run.resume auto")
    parser.add_argument("--anyway", action="store_true", help="start a run that the forecast says cannot fit")
    parser.add_argument("--print-config", action="store_true", help="show the whole configuration and stop")
    parser.add_argument("--hostfile", type=Path, help="start the ranks on the nodes of this file, by DeepSpeed's launcher")


def run(options: argparse.Namespace) -> int:
    """Run ``tune`` or ``pretrain``; returns the exit code."""
    command, overrides = options.subcommand, list(options.overrides)
    if options.resume:
        overrides.append(("run.resume", "auto"))
    from finetune.launch import external
    from finetune.launch.common import plain
    from finetune.launch.run import train

    if external.started_by_launcher():
        overrides.append(("run.ranks", str(external.world_size())))
    elif options.hostfile is not None:
        external.hand_over(options.hostfile, [command, *_without_hostfile(options.words)])
    config = load_config(options.config, overrides, command=command)
    if options.print_config:
        yaml.safe_dump(plain(asdict(with_rate(config)[0])), sys.stdout, sort_keys=False, allow_unicode=True)
        return 0
    return train(config, Console(), command=command, anyway=options.anyway)


def _without_hostfile(words: Sequence[str]) -> Iterator[str]:
    """The arguments of each rank."""
    left = iter(words)
    for word in left:
        if word == "--hostfile":
            next(left)
        elif not word.startswith("--hostfile="):
            yield word
