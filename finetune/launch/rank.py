"""One rank process: ``python -m finetune.launch.rank RUN.json``. Started by ``finetune.launch.local``, never by hand.

It is told its configuration in a file and, by one line on standard input once the data is ready, to go. It dies with the
process that started it, and leaves the reason of its own end in ``<output>/logs/rank-N.error.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from finetune.config import TuneConfig
from finetune.errors import ConfigError, FinetuneError
from finetune.launch.common import ending_with_it
from finetune.launch.instructions import Command, Instructions, RunFile, decoded
from finetune.machine.device_memory import let_segments_grow
from finetune.machine.process import die_with_parent, without_collection
from host.process import end_process

if TYPE_CHECKING:
    import torch
    from rich.console import Console


def main(run_file: Path) -> None:
    """Be one rank until its end; a failure ends the process with its own exit code."""
    die_with_parent(int(os.environ["TESSERA_PARENT"]))
    rank = int(os.environ["RANK"])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    run = RunFile.read(run_file)
    reason_file = Path(run.config.run.output) / "logs" / f"rank-{rank}.error.json"
    with ending_with_it(lambda error, code: _leave_reason(reason_file, error, code)):
        _train(run, rank, stop)


def _train(run: RunFile, rank: int, stop: threading.Event) -> None:
    with without_collection():
        device = choose_device(run.config, local_ranks=run.config.run.ranks)
        prepare_process(device)
        from rich.console import Console

        from finetune.engines.zero import engine

    console = Console(file=_console(), width=_width()) if rank == 0 else None
    look_ahead(run.config, console, command=run.command, anyway=run.anyway)
    line = sys.stdin.readline()
    if not line:
        return  # the launcher gave up before training began
    told = decoded(line.encode())
    assert isinstance(told, Instructions), "the launcher refuses by itself"
    place = engine.start_ranks(device, rank)
    with _console() if rank == 0 else open(os.devnull, "w") as out:
        train_rank(run.config, told, place, stop.is_set, Console(file=out, width=_width()), command=run.command)


def look_ahead(config: TuneConfig, console: Console | None, *, command: Command, anyway: bool) -> None:
    """Refuse, before the data is ready, what can be seen to fail; the rank that has a console forecasts what the run needs.

    Raises:
        ConfigError: a new model that cannot be, or a run that cannot fit.
    """
    from finetune.forecast.check import check_fits
    from finetune.model import build

    if config.model.new is not None:
        build.check_new_config(config.model.new)
    if console is not None:
        check_fits(config, console, command=command, anyway=anyway)


def train_rank(
    config: TuneConfig,
    told: Instructions,
    place: torch.device,
    should_stop: Callable[[], bool],
    console: Console,
    *,
    command: Command,
) -> None:
    """Train as one of the ranks that have joined.

    Args:
        place: this rank's device.
        should_stop: asked once a step.
    """
    from finetune.machine.build_ops import load_all
    from finetune.machine.swap import held_swap
    from finetune.train.begin import Job, run_rank

    load_all(told.ops, device=place.type)
    swap = None if told.swap is None else Path(told.swap)
    job = Job(
        config=config,
        prepared=told.prepared,
        device=place,
        precision=choose_precision(config, place.type),
        cpu_adam="cpu_adam" in told.ops,
        disk=told.disk,
        swap=swap,
        pipeline=command == "pretrain",
    )
    with held_swap(swap):
        run_rank(job, console, should_stop)


def _console() -> TextIO:
    """The launcher's terminal, or wherever its output goes; rank 0 alone has it."""
    return open(os.dup(int(os.environ["TESSERA_CONSOLE_FD"])), "w", encoding="utf-8")


def _width() -> int | None:
    return int(os.environ.get("TESSERA_CONSOLE_WIDTH", "0")) or None


def choose_device(config: TuneConfig, *, local_ranks: int, by_launcher: bool = False) -> str:
    """``cpu`` or ``cuda``, by ``run.device`` and the GPUs of this machine.

    Args:
        by_launcher: whether another program started the ranks, and may have shown each of them a GPU of its own.

    Raises:
        ConfigError: fewer GPUs than ranks on this machine, or options that need CUDA where there is none.
    """
    import torch

    has_cuda, num_gpus = torch.cuda.is_available(), torch.cuda.device_count()
    device = config.run.device
    each_sees = f"run.device is {device}; {local_ranks} ranks run on this machine, and this one sees {num_gpus} GPUs"
    all_seen = "let each rank see all of them (Slurm: --gpus-per-node in place of --gpus-per-task, no --gpu-bind)"
    if by_launcher and device != "cpu" and has_cuda and local_ranks > num_gpus:
        raise ConfigError(f"{each_sees}: {all_seen}, or set run.device to cpu")
    if device == "auto":
        device = "cuda" if has_cuda and local_ranks <= num_gpus else "cpu"
        if device == "cpu":
            _check_cpu(config)
        return device
    if device == "cuda" and local_ranks > num_gpus:
        raise ConfigError(f"run.ranks is {local_ranks}; it must be at most {num_gpus}, the GPUs torch sees (run.device: cuda)")
    return device


def prepare_process(device: str) -> None:
    """Tell torch and DeepSpeed what this process trains on, before either is used."""
    os.environ["DS_ACCELERATOR"] = device  # DeepSpeed decides when it is imported
    if device == "cuda":
        let_segments_grow(os.environ)


def choose_precision(config: TuneConfig, device: str) -> str:
    """``bf16``, ``fp16`` or ``fp32``, by ``run.precision`` and what the device computes with."""
    import torch

    if config.run.precision != "auto":
        return config.run.precision
    if device != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def _check_cpu(config: TuneConfig) -> None:
    """What the configuration refuses for ``run.device: cpu``, where ``auto`` has come to mean it."""
    for key, value, rule in (
        ("run.precision", config.run.precision == "fp16", "fp16 needs CUDA, and no GPU was found; use bf16 or fp32"),
        ("offload.method", config.offload.method == "superoffload", "superoffload needs CUDA, and no GPU was found; use plain"),
    ):
        if value:
            raise ConfigError(f"{key}: {rule}")


def _leave_reason(file: Path, error: BaseException, code: int) -> None:
    expected = isinstance(error, FinetuneError)
    if expected:
        print(f"error: {error}", file=sys.stderr)
    reason = {
        "time": time.time(),
        "exit_code": code,
        "expected": expected,
        "message": str(error) if expected else f"{type(error).__name__}: {error}",
    }
    file.write_text(json.dumps(reason), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_process(0)
