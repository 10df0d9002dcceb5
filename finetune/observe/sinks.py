"""Where figures go besides ``log.jsonl``: TensorBoard events and Weights & Biases."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from finetune.config import TuneConfig
from finetune.errors import ConfigError
from finetune.observe.metrics import HOST


def check_sinks(config: TuneConfig) -> None:
    """What is asked for must be there before anything is started.

    Raises:
        ConfigError: ``log.wandb`` without its package, or ``log.metrics_port`` that cannot be bound.
    """
    log = config.log
    if log.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"log.wandb is {log.wandb!r}; the package wandb is not installed: pip install wandb, or leave the key out"
        )
    if log.metrics_port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, log.metrics_port))
            except OSError as error:
                rule = f"cannot be bound on {HOST}: {error.strerror}; take another, or 0 for a free one"
                raise ConfigError(f"log.metrics_port is {log.metrics_port}; it {rule}") from error


class _Events(Protocol):
    """What we use of TensorBoard's ``SummaryWriter``."""

    def add_scalar(self, name: str, value: float, step: int) -> None: ...

    def close(self) -> None: ...


class _Run(Protocol):
    """What we use of a run of Weights & Biases."""

    id: str

    def log(self, data: dict[str, float], *, step: int) -> None: ...

    def finish(self) -> None: ...


class Sinks:
    """Writes what a run measures to TensorBoard and Weights & Biases, each if the configuration asks for it."""

    def __init__(self, config: TuneConfig, *, done: int) -> None:
        output = Path(config.run.output)
        self._events = _events(output / "tensorboard", done) if config.log.tensorboard else None
        self._wandb = None if config.log.wandb is None else _wandb(config, output)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._events is not None:
            for name, value in scalars.items():
                self._events.add_scalar(name, value, step)
        if self._wandb is not None and scalars:
            self._wandb.log(dict(scalars), step=step)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()


def _events(folder: Path, done: int) -> _Events:
    from torch.utils.tensorboard import SummaryWriter

    events: _Events = SummaryWriter(str(folder), purge_step=done + 1 if done else None, flush_secs=30)
    return events


def _wandb(config: TuneConfig, output: Path) -> _Run:
    """A run of the project, the same one again when a training run is resumed.

    Raises:
        ConfigError: Weights & Biases does not take it, for want of a login most often.
    """
    import wandb

    kept = output / "wandb-run"
    known = kept.read_text(encoding="utf-8").strip() if kept.is_file() else None
    try:
        run: _Run = wandb.init(
            project=config.log.wandb, id=known, resume="allow", dir=str(output), name=output.name, config=asdict(config)
        )
    except Exception as error:  # its own kinds, which differ from release to release
        remedy = "log in with `wandb login`, set WANDB_MODE=offline, or leave the key out"
        raise ConfigError(f"log.wandb is {config.log.wandb!r}; Weights & Biases said: {error}; {remedy}") from error
    kept.write_text(f"{run.id}\n", encoding="utf-8")
    return run
