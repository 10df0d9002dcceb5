"""A run from its configuration to its end, whoever starts its ranks: this process, or a launcher that has started it as one."""

from __future__ import annotations

import os

from rich.console import Console

from finetune.base_model.hub import located
from finetune.config import TuneConfig
from finetune.launch import external
from finetune.launch.common import saying, silent
from finetune.launch.instructions import Command


def train(config: TuneConfig, console: Console, *, command: Command = "tune", anyway: bool = False) -> int:
    """Prepare the data, start the ranks or be one of them, and wait for the end; returns the exit code.

    The ranks import what is slow while the data is tokenised; a run that cannot fit is refused, unless ``anyway``.

    Raises:
        FinetuneError: what was wrong; no process is left.
    """
    from finetune.forecast.least import check_least
    from finetune.launch import local
    from finetune.observe.sinks import check_sinks

    check_sinks(config)
    joins = external.started_by_launcher()
    if not anyway and not (joins and external.on_several_machines()):  # several have more memory than this one
        check_least(located(config, command=command, need="config"))
    config = located(config, saying(console) if os.environ.get("RANK", "0") == "0" else silent, command=command)
    if joins:
        external.train(config, console, command=command, anyway=anyway)
    return local.train(config, console, command=command, anyway=anyway)
