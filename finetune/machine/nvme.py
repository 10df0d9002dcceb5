"""NVMe offload, checked before a run: the library, the folder, the room; and settings from what the disk can do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import prod
from pathlib import Path

from finetune.config import DiskSettings, TuneConfig
from finetune.errors import ConfigError
from finetune.machine import inventory, ops
from host.modules import import_path, module_command

Say = Callable[[str], None]
MEASURED = "tessera-disk.json"
"""In ``offload.path``: what an earlier run measured."""
PROBE_BYTES = 64 << 20
CANDIDATES = tuple((block, depth, threads) for block in (1 << 18, 1 << 20) for depth in (8, 32) for threads in (1, 2))
"""Block sizes, queue depths and threads that are tried; small blocks, since smaller tensors are not offloaded."""
_MOST_SUB_GROUP = 50_000_000
_SMALLEST_SWAPPED = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """The best settings found, and what they gave."""

    block_bytes: int
    queue_depth: int
    threads: int
    read_gib_s: float
    write_gib_s: float


def prepare_disk(swap: Path, say: Say) -> Disk:
    """Check everything NVMe offload needs but the room, then measure the disk, or find it measured.

    Args:
        swap: the run's folder below ``offload.path``, see ``finetune.machine.swap``.

    Raises:
        ConfigError: names what is missing and the remedy.
    """
    folder = swap.parent
    for op in (ops.PIN_MEMORY, ops.ASYNC_IO):
        if not ops.library_of(op).is_file() and inventory.libaio() is None:
            raise ConfigError(
                "offload: nvme needs libaio, and its header libaio.h is not found; on Debian and Ubuntu: apt-get install "
                "libaio-dev; on Fedora: dnf install libaio-devel; or offload to cpu"
            )
        built = ops.ensure(op, say)
        if not built.available:
            raise ConfigError(f"offload: nvme needs it, but {built.reason}; or offload to cpu")
    known = folder / MEASURED
    try:
        return Disk(**json.loads(known.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        pass
    say(f"measuring the disk of {folder} once, about 10 s")
    disk = _measure(swap)
    with suppress(OSError):  # another user's: measured again by the next run
        known.write_text(json.dumps(asdict(disk)) + "\n", encoding="utf-8")
    threads = "1 thread" if disk.threads == 1 else f"{disk.threads} threads"
    say(
        f"the disk reads {disk.read_gib_s:.1f} GiB/s and writes {disk.write_gib_s:.1f}: "
        f"blocks of {disk.block_bytes >> 10} KiB, {disk.queue_depth} in flight, {threads}"
    )
    return disk


def _measure(folder: Path) -> Disk:
    """Let DeepSpeed's own file access try the candidates, in a process that can load it."""
    environment = {**os.environ, "PATH": inventory.search_path(), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment |= {"TESSERA_PARENT": str(os.getpid()), "PYTHONPATH": import_path(os.environ)}
    libraries = [str(ops.library_of(op)) for op in (ops.PIN_MEMORY, ops.ASYNC_IO)]
    command = [*module_command("finetune.machine.build_ops"), "measure-disk", str(folder), *libraries]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
        return Disk(**json.loads(done.stdout.strip().splitlines()[-1]))
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:]
        raise ConfigError(f"offload.path: {folder.parent}: direct file access failed: {last[0] if last else error}") from error
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, TypeError) as error:
        raise ConfigError(f"offload.path: {folder.parent}: the disk could not be measured: {error}") from error


def disk_settings(
    config: TuneConfig, disk: Disk, swap: Path, shapes: Mapping[str, tuple[int, ...]], bytes_per_element: int
) -> DiskSettings:
    """Buffers from the model's sizes, after a look at the room on the disk.

    Args:
        swap: the run's folder below ``offload.path``.
        shapes: of every parameter, whole.
        bytes_per_element: of the parameters that compute.

    Raises:
        ConfigError: the disk is too small.
    """
    ranks = config.data_ranks
    parts = [-(-prod(shape) // ranks) for shape in shapes.values()]
    largest = max(parts)
    # At most this many parts that are offloaded at all lie next to one another within one part's size: those may be
    # fetched ahead; two more are in use.
    smallest = _SMALLEST_SWAPPED // bytes_per_element
    swapped = [part for part in parts if part >= smallest]
    ahead = max((_run_within(swapped[at:], largest) for at in range(len(swapped))), default=0)
    settings = DiskSettings(
        folder=str(swap),
        block_bytes=disk.block_bytes,
        queue_depth=disk.queue_depth,
        threads=disk.threads,
        buffer_elements=largest,
        buffers=ahead + 4,
        sub_group_elements=max(largest, min(_MOST_SUB_GROUP, sum(parts))),
    )
    _check_room(config, swap, sum(parts) * ranks, bytes_per_element)
    return settings


def _run_within(parts: list[int], limit: int) -> int:
    return sum(total <= limit for total in accumulate(parts))


def _check_room(config: TuneConfig, swap: Path, elements: int, bytes_per_element: int) -> None:
    needed = 0
    if config.offload.optimizer == "nvme":
        needed += elements * 16  # fp32 weights, two moments, gradients
    if config.offload.parameters == "nvme":
        needed += elements * bytes_per_element
    free = shutil.disk_usage(swap.parent).free
    if needed > free:
        raise ConfigError(
            f"offload.path: {config.offload.path} has {free / 2**30:.1f} GiB free; this model needs {needed / 2**30:.1f}; "
            "name a larger disk, or offload less"
        )
