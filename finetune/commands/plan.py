"""``tessera-finetune plan``: what a run will need against what there is, without running it. Exit code 2: it does not fit."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from finetune.commands.parser import CommandParser, add_config, require_option
from finetune.commands.tables import table_console
from finetune.config import TuneConfig
from finetune.config.load import load_config, read_tree
from finetune.errors import ConfigError
from finetune.machine.process import without_collection

if TYPE_CHECKING:
    from finetune.forecast.hardware import Hardware
    from finetune.forecast.speeds import Measured

_ROOM: Final = ("gpu_gib", "ram_gib", "nvme_gib", "disk_gib")
"""Options that say how much room a described machine has."""


def add_arguments(parser: CommandParser) -> None:
    """What the command takes."""
    parser.description = (
        "What a run will need against what this machine has, without running it: memory of the devices and the host, NVMe,\n"
        "disk, time. Exit code 0: it fits, 2: it does not."
    )
    add_config(parser)
    parser.add_argument("--gpus", type=int, help="GPUs of a described machine; 0: none")
    parser.add_argument("--gpu-gib", type=float, help="memory of each of them")
    parser.add_argument("--ram-gib", type=float, help="host memory of a described machine")
    parser.add_argument("--nvme-gib", type=float, help="free space of its NVMe disk")
    parser.add_argument("--disk-gib", type=float, help="free space where its runs are kept")
    parser.add_argument(
        "--command",
        choices=("tune", "pretrain"),
        help="what will train; unset: pretrain for a file with pipeline.stages above 1 or zero.stage 0, else tune",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure this machine's speeds anew, about half a minute, and keep them: the seconds of a step on its CPU follow "
        "from them where no run in the folder has measured its own",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    require_option(options.gpus is None or options.gpus >= 0, "gpus", options.gpus, "be 0 or more")
    if options.gpus and options.gpu_gib is None:
        raise ConfigError("--gpus needs --gpu-gib, the memory of each")
    for name in _ROOM:
        value = getattr(options, name)
        require_option(value is None or 0 < value < 1e9, name, value, "be greater than 0")
    described = [name for name in ("gpus", *_ROOM) if getattr(options, name) is not None]
    if options.measure and described:
        raise ConfigError(f"--measure measures this machine; --{described[0].replace('_', '-')} describes another")

    from finetune.base_model.hub import located

    command = options.command or _command_of(options.config, options.overrides)
    given = load_config(options.config, options.overrides, command=command)
    config = located(given, command=command, need="config")
    # Of a model of the hub no weights are downloaded for a plan.
    return plan(config, options, table_console(), command=command, weights=config.model == given.model)


def _command_of(path: Path, overrides: Sequence[tuple[str, str]]) -> str:
    """``pretrain`` for a file that has stages, or repeats all state; else ``tune``."""
    tree = read_tree(path, overrides).values
    sections = (tree.get("pipeline"), tree.get("zero"))
    pipeline, zero = (section if isinstance(section, dict) else {} for section in sections)
    return "pretrain" if pipeline.get("stages", 1) != 1 or zero.get("stage") == 0 else "tune"


def plan(config: TuneConfig, options: argparse.Namespace, console: Console, *, command: str, weights: bool = True) -> int:
    """Work the forecast of a run of ``command`` out and show it; the exit code says whether the run fits.

    Args:
        weights: whether those of ``model.path`` must be there.

    Raises:
        ConfigError: the configuration's model cannot be.
    """
    with without_collection():
        from finetune.forecast.advice import advise
        from finetune.forecast.estimate import forecast, model_config_of, precision_of
        from finetune.forecast.hardware import described_machine
        from finetune.forecast.pace import kept_pace
        from finetune.forecast.show import show_plan

    hf_config = model_config_of(config, weights=weights)
    hardware = described_machine(config, gpus=options.gpus, **{name: getattr(options, name) for name in _ROOM})
    precision = precision_of(config, hardware.device)
    speeds = _speeds(config, hardware, precision, command, console, anew=options.measure)
    pace = None if hardware.described else kept_pace(config)
    try:
        found = forecast(config, hf_config, hardware, precision=precision, command=command, pace=pace, speeds=speeds)
    except RuntimeError as error:  # torch cannot follow all that it computes
        rule = f"no forecast can be made of this {hf_config.model_type}, which is trained all the same"
        raise ConfigError(f"{rule}: {' '.join(str(error).split())[:300]}") from error
    advice = advise(config, hf_config, found, precision=precision, command=command) if found.shortages() else []
    if options.json:
        changes = [dict(option.change) for option in advice]
        measured = {"measured": asdict(speeds)} if options.measure and speeds is not None else {}
        sys.stdout.write(json.dumps({**found.as_json(), "advice": changes, **measured}, indent=2, default=str) + "\n")
    else:
        if options.measure and speeds is not None:
            for line in speeds.lines():
                console.print(f"measured {line}", highlight=False, soft_wrap=True)
        show_plan(found, config, advice, console)
    return 2 if found.shortages() else 0


def _speeds(
    config: TuneConfig, hardware: Hardware, precision: str, command: str, console: Console, *, anew: bool
) -> Measured | None:
    """This machine's, measured anew or kept; ``None`` where they would say nothing of the run."""
    from finetune.forecast.measure import kept_speeds, measure_speeds
    from finetune.forecast.seconds import is_measurable

    measurable = is_measurable(config, hardware.device)
    if anew and not measurable:
        raise ConfigError(
            "--measure: only a CPU's speeds are measured, and those of runs without NVMe offload and ZenFlow; this run takes "
            + ("GPUs (run.device)" if hardware.device != "cpu" else "one of the two (offload)")
        )
    if not measurable or hardware.described:
        return None
    if not anew:
        return kept_speeds(config, precision, command)
    from finetune.launch.prerequisites import built_ops

    return measure_speeds(config, precision, command, libraries=built_ops(config, lambda text: None))
