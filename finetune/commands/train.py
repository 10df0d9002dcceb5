"""``tessera-finetune tune`` and ``pretrain``: from a file to ranks that train, and what becomes of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import yaml
from rich.console import Console

from finetune.commands.parser import command_parser
from finetune.config import TuneConfig
from finetune.config.learning_rate import with_rate
from finetune.config.load import load_config
from finetune.config.read import describe, split_overrides


def main(command: str, words: Sequence[str]) -> int:
    """Run ``tune`` or ``pretrain``; returns the exit code."""
    keys = "\n".join(f"  --{name} ({default})\n      {meaning}" for name, default, meaning in describe(TuneConfig))
    parser = command_parser(
        command,
        epilog=f"Every key of the file can be given as an option, its value read as YAML:\n\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    parser.add_argument("--resume", action="store_true", help="go on from the newest save; short for --run.resume auto")
    parser.add_argument("--anyway", action="store_true", help="start a run that the forecast says cannot fit")
    parser.add_argument("--print-config", action="store_true", help="show the whole configuration and stop")
    parser.add_argument("--hostfile", type=Path, help="start the ranks on the nodes of this file, by DeepSpeed's launcher")
    overrides, rest = split_overrides(words, [field.name for field in fields(TuneConfig)])
    options = parser.parse_args(rest)
    if options.resume:
        overrides.append(("run.resume", "auto"))
    from finetune.launch import external
    from finetune.launch.common import plain
    from finetune.launch.run import train

    if external.started_by_launcher():
        overrides.append(("run.ranks", str(external.world_size())))
    elif options.hostfile is not None:
        at = words.index("--hostfile") if "--hostfile" in words else None
        external.hand_over(options.hostfile, [command, *(words if at is None else words[:at] + words[at + 2 :])])
    config = load_config(options.config, overrides, command=command)
    if options.print_config:
        yaml.safe_dump(plain(asdict(with_rate(config)[0])), sys.stdout, sort_keys=False, allow_unicode=True)
        return 0
    return train(config, Console(), command=command, anyway=options.anyway)
