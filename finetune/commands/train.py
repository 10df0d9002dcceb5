"""``tessera-finetune tune`` and ``pretrain``: from a file to ranks that train, and what becomes of them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape

from finetune.commands.parser import command_parser
from finetune.config import TuneConfig
from finetune.config.learning_rate import with_rate
from finetune.config.load import load_config
from finetune.config.read import describe, split_overrides
from finetune.machine.swap import claimed_swap
from finetune.output.folder import claimed_output


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


def plain(value: Any) -> Any:
    """Tuples as lists, for YAML and JSON."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def train(config: TuneConfig, console: Console, *, command: str = "tune", anyway: bool = False) -> int:
    """Prepare the data, start the ranks, and wait for them.

    The ranks import what is slow while the data is tokenised here; rank 0 refuses what cannot fit, unless ``anyway``.

    Raises:
        FinetuneError: what was wrong; no process is left.
    """
    from finetune.base_model.hub import located
    from finetune.forecast.least import check_least
    from finetune.launch import external
    from finetune.launch.local import RankProcesses
    from finetune.launch.prerequisites import make_ready, settled
    from finetune.observe.outside import observed
    from finetune.observe.sinks import check_sinks

    check_sinks(config)

    def say(text: str) -> None:
        console.print(f"[dim]{escape(text)}[/]", highlight=False, soft_wrap=True)

    if not anyway and not external.started_by_launcher():  # several nodes have more memory than this one
        check_least(located(config, command=command, need="config"))
    config = located(config, say if os.environ.get("RANK", "0") == "0" else lambda _: None, command=command)
    if external.started_by_launcher():
        external.train(config, plain(asdict(config)), console, command=command, anyway=anyway)
    with ExitStack() as stack:
        output = stack.enter_context(claimed_output(config))
        config = settled(config, say)
        settings = plain(asdict(config))
        # The swap files go once no rank is left that could use them.
        swap = stack.enter_context(claimed_swap(config, say))
        run = {"config": settings, "command": command, "anyway": anyway}
        ranks = stack.enter_context(RankProcesses(output, run, ranks=config.run.ranks, threads=config.run.threads))
        (output / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), encoding="utf-8")
        ranks.go(make_ready(config, say, ranks.check, swap=swap))
        with observed(config, ranks.process_ids, console):
            ranks.wait()
        return 1 if ranks.interrupted is signal.SIGINT else 0
