"""What is done once, before any rank trains: the data tokenised, the disk measured, DeepSpeed's operations built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from finetune import ops
from finetune.config import TuneConfig
from finetune.errors import ConfigError

Say = Callable[[str], None]


def make_ready(
    config: TuneConfig, say: Say, check: Callable[[], None] = lambda: None, *, swap: Path | None = None
) -> dict[str, Any]:
    """Prepare everything a rank needs; returns what the ranks are told, fit for JSON.

    Args:
        say: told what takes time.
        check: called every so often; what it raises ends the work.
        swap: the run's folder on the disk, of ``finetune.swap.claimed_swap``; needed when anything is offloaded to NVMe.

    Raises:
        FinetuneError: the data, the tokenizer or the disk is at fault.
    """
    from finetune.data.tokenise import prepare
    from finetune.nvme import prepare_disk

    try:
        prepared = prepare(config, say, check)
    except OSError as error:
        raise ConfigError(f"run.output: {config.run.output}: the tokenised data cannot be written: {error}") from error
    check()
    assert swap is not None or not config.offload.on_disk, "nobody has claimed a folder for the swap files"
    disk = None if swap is None else prepare_disk(swap, say)
    built = built_ops(config, say)
    check()
    return {
        "prepared": asdict(prepared),
        "ops": built,
        "disk": None if disk is None else asdict(disk),
        "swap": None if swap is None else str(swap),
    }


def built_ops(config: TuneConfig, say: Say) -> dict[str, str]:
    """Libraries of the operations a run loads on this machine, built if need be, by name.

    Raises:
        ConfigError: NVMe offload, and one cannot be built.
    """
    built: dict[str, str] = {}
    offload = config.offload
    wanted = [ops.PIN_MEMORY, ops.ASYNC_IO] if offload.on_disk else []
    if offload.optimizer != "none" and config.algorithm == "adamw":
        wanted.append(ops.CPU_ADAM)
    for op in wanted:
        found = ops.ensure(op, say)
        if found.available:
            built[op] = str(ops.library_of(op))
        elif op == ops.CPU_ADAM and offload.ratio < 1.0:
            raise ConfigError(f"offload.ratio: below 1 needs DeepSpeed's CPU Adam, but {found.reason}; or leave it at 1")
        elif op == ops.CPU_ADAM and not offload.on_disk:
            say(f"{found.reason}; training goes on with torch's AdamW on the CPU, which is slower and as exact")
        else:
            raise ConfigError(f"offload: nvme needs it, but {found.reason}; or offload to cpu")
    return built
