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
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from finetune.config import TuneConfig
from finetune.config.read import build
from finetune.errors import ConfigError, FinetuneError
from finetune.machine.process import die_with_parent, end_process, without_collection

if TYPE_CHECKING:
    import torch
    from rich.console import Console


def main(run_file: Path) -> int:
    """Run one rank to its end; returns the exit code."""
    die_with_parent(int(os.environ["TESSERA_PARENT"]))
    rank = int(os.environ["RANK"])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    job = json.loads(run_file.read_text(encoding="utf-8"))
    config = build(TuneConfig, job["config"], {})
    try:
        _train(config, rank, stop, pipeline=job.get("command") == "pretrain", anyway=bool(job.get("anyway")))
    except BaseException as error:
        traceback.print_exc()
        code = error.exit_code if isinstance(error, FinetuneError) else 1
        _leave_reason(Path(config.run.output), rank, error, code)
        sys.stdout.flush()
        sys.stderr.flush()
        # No clean-up that could wait for other ranks: threads of a torn process group may never end.
        os._exit(code)
    return 0


def _train(config: TuneConfig, rank: int, stop: threading.Event, **options: bool) -> None:
    with without_collection():
        device = choose_device(config, local_ranks=config.run.ranks)
        os.environ["DS_ACCELERATOR"] = device  # DeepSpeed decides when it is imported
        from rich.console import Console

        from finetune.engines.zero import engine

    command = "pretrain" if options["pipeline"] else "tune"
    console = Console(file=_console(), width=_width()) if rank == 0 else None
    look_ahead(config, console, command=command, anyway=options["anyway"])
    line = sys.stdin.readline()
    if not line:
        return  # the launcher gave up before training began
    told: dict[str, Any] = json.loads(line)
    place = engine.start_ranks(device, rank)
    with _console() if rank == 0 else open(os.devnull, "w") as out:
        train_rank(config, told, place, stop.is_set, Console(file=out, width=_width()), pipeline=options["pipeline"])


def look_ahead(config: TuneConfig, console: Console | None, *, command: str, anyway: bool) -> None:
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
    told: Mapping[str, Any],
    place: torch.device,
    should_stop: Callable[[], bool],
    console: Console,
    *,
    pipeline: bool,
) -> None:
    """Train as one of the ranks that have joined.

    Args:
        told: what ``finetune.launch.prerequisites.make_ready`` returned.
        place: this rank's device.
    """
    from finetune.data.prepare import Prepared
    from finetune.machine import build_ops
    from finetune.machine.nvme import Disk
    from finetune.machine.swap import held_swap
    from finetune.train import begin

    for name, library in told["ops"].items():
        build_ops.load_op(name, Path(library))
    precision = choose_precision(config, place.type)
    swap = None if told["swap"] is None else Path(told["swap"])
    job = begin.Job(
        config=config,
        prepared=Prepared(**told["prepared"]),
        device=place,
        precision=precision,
        cpu_adam="cpu_adam" in told["ops"],
        disk=None if told["disk"] is None else Disk(**told["disk"]),
        swap=swap,
        pipeline=pipeline,
    )
    with held_swap(swap):
        begin.run_rank(job, console, should_stop)


def _console() -> TextIO:
    """The launcher's terminal, or wherever its output goes; rank 0 alone has it."""
    return open(os.dup(int(os.environ["TESSERA_CONSOLE_FD"])), "w", encoding="utf-8")


def _width() -> int | None:
    return int(os.environ.get("TESSERA_CONSOLE_WIDTH", "0")) or None


def choose_device(config: TuneConfig, *, local_ranks: int) -> str:
    """``cpu`` or ``cuda``, by ``run.device`` and the GPUs of this machine.

    Raises:
        ConfigError: fewer GPUs than ranks on this machine, or options that need CUDA where there is none.
    """
    import torch

    has_cuda, num_gpus = torch.cuda.is_available(), torch.cuda.device_count()
    device = config.run.device
    if device == "auto":
        device = "cuda" if has_cuda and local_ranks <= num_gpus else "cpu"
        if device == "cpu":
            _check_cpu(config)
        return device
    if device == "cuda" and local_ranks > num_gpus:
        raise ConfigError(f"run.ranks is {local_ranks}; it must be at most {num_gpus}, the GPUs torch sees (run.device: cuda)")
    return device


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


def _leave_reason(output: Path, rank: int, error: BaseException, code: int) -> None:
    reason = {
        "time": time.time(),
        "exit_code": code,
        "expected": isinstance(error, FinetuneError),
        "message": str(error) if isinstance(error, FinetuneError) else f"{type(error).__name__}: {error}",
    }
    (output / "logs" / f"rank-{rank}.error.json").write_text(json.dumps(reason), encoding="utf-8")


if __name__ == "__main__":
    end_process(main(Path(sys.argv[1])))
