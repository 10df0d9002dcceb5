"""The forecast at the start of a run: said, kept, and enforced before any rank loads a model."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from finetune.config import TuneConfig
from finetune.errors import ConfigError, FinetuneError
from finetune.forecast.estimate import Forecast, forecast, model_config_of, precision_of
from finetune.forecast.hardware import this_machine
from finetune.forecast.least import REMEDY
from finetune.forecast.measure import kept_speeds
from finetune.forecast.memory import PROCESS_BYTES
from finetune.forecast.pace import kept_pace
from finetune.forecast.seconds import is_measurable
from finetune.forecast.show import summary
from finetune.machine.memory import pages_of
from finetune.output.records import FORECAST, write_json

_logger = logging.getLogger(__name__)
_TO_COME_BYTES = 8 << 20
"""What a rank's process still grows by before it has a model: the process group, its threads."""


def check_fits(config: TuneConfig, console: Console, *, command: str, anyway: bool) -> None:
    """Say what the run needs; write ``forecast.json``.

    Called by rank 0 after its imports, so what a process takes without a model is measured, not assumed.

    Args:
        command: ``tune`` or ``pretrain``.
        anyway: start what does not fit all the same.

    Raises:
        ConfigError: it does not fit, or the configuration's model cannot be.
    """
    try:
        found = _forecast_here(config, command)
    except FinetuneError:
        raise
    except Exception as error:  # a model that cannot be simulated can still be trained
        _logger.exception("the forecast failed")
        console.print(f"[yellow]no forecast: {escape(f'{type(error).__name__}: {error}'[:200])}[/]", highlight=False)
        return
    write_json(Path(config.run.output) / FORECAST, found.as_json())
    for line in summary(found):
        console.print(f"[dim]forecast: {escape(line)}[/]", highlight=False, soft_wrap=True)
    shortages = found.shortages()
    if not shortages:
        return
    what = "; ".join(shortages)
    if anyway:
        console.print(
            f"[yellow]does not fit: {escape(what)}; started all the same (--anyway)[/]", highlight=False, soft_wrap=True
        )
        return
    raise ConfigError(f"the run does not fit this machine: {what}. {REMEDY}")


def _forecast_here(config: TuneConfig, command: str) -> Forecast:
    pages = pages_of()
    process = 0 if pages is None else pages.own + _TO_COME_BYTES
    taken = config.run.ranks * (process or PROCESS_BYTES["cpu"])
    hardware = this_machine(config, already_taken=taken)
    if hardware.device == "cuda":
        process = 0  # a context and its libraries come with the device
    precision = precision_of(config, hardware.device)
    return forecast(
        config,
        model_config_of(config),
        hardware,
        precision=precision,
        command=command,
        pace=kept_pace(config),
        speeds=kept_speeds(config, precision, command) if is_measurable(config, hardware.device) else None,
        process_bytes=process,
    )
