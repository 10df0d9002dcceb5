"""What the machine has, or what a described one would have: the right side of every comparison."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from finetune.config import TuneConfig
from finetune.machine import inventory
from host import limits

_SHARED: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Room for a run. ``None`` is unknown: nothing is compared with it."""

    device: str
    """``cpu`` or ``cuda``."""
    gpus: int
    gpu_bytes: int | None
    """Memory of the smallest device; ``None`` on a CPU, and where one of the devices does not tell."""
    ram_bytes: int
    """Host memory this run may take: what is there and not taken by others."""
    disk_bytes: int | None
    """Free where the run is kept."""
    nvme_bytes: int | None
    """Free where the offloaded state lies."""
    shared_bytes: int | None = None
    """Free in ``/dev/shm``, where processes of one machine share memory."""
    described: bool = False
    """Whether any of it was given by hand."""


def this_machine(config: TuneConfig, *, already_taken: int = 0) -> Hardware:
    """The machine this process runs on.

    Args:
        already_taken: bytes of host memory that the run itself holds already.
    """
    gpus = inventory.gpu_memory_bytes()
    known = [size for size in gpus if size is not None]
    wants_gpu = config.run.device == "cuda" or (config.run.device == "auto" and config.run.ranks <= len(gpus))
    device = "cuda" if gpus and wants_gpu else "cpu"
    return Hardware(
        device=device,
        gpus=len(gpus),
        gpu_bytes=min(known) if device == "cuda" and len(known) == len(gpus) else None,
        ram_bytes=min(inventory.memory_bytes(), limits.memory_available() + already_taken),
        disk_bytes=free_bytes(Path(config.run.output)),
        nvme_bytes=_nvme_free(config),
        shared_bytes=shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None,
    )


def described_machine(
    config: TuneConfig,
    *,
    gpus: int | None,
    gpu_gib: float | None,
    ram_gib: float | None,
    nvme_gib: float | None,
    disk_gib: float | None,
) -> Hardware:
    """This machine, with what is given put in its place; ``gpus`` of 0 is a machine without any."""
    here = this_machine(config)
    if gpus is None and gpu_gib is not None:
        gpus = config.run.ranks
    count = here.gpus if gpus is None else gpus
    device = here.device if gpus is None else ("cuda" if gpus > 0 and config.run.device != "cpu" else "cpu")
    memory = here.gpu_bytes if gpu_gib is None else gib(gpu_gib)
    return Hardware(
        device=device,
        gpus=count,
        gpu_bytes=memory if device == "cuda" else None,
        ram_bytes=here.ram_bytes if ram_gib is None else gib(ram_gib),
        disk_bytes=here.disk_bytes if disk_gib is None else gib(disk_gib),
        nvme_bytes=here.nvme_bytes if nvme_gib is None else gib(nvme_gib),
        shared_bytes=here.shared_bytes if ram_gib is None else None,
        described=any(value is not None for value in (gpus, gpu_gib, ram_gib, nvme_gib, disk_gib)),
    )


def gib(value: float) -> int:
    return round(value * (1 << 30))


def free_bytes(folder: Path) -> int | None:
    """Free space where ``folder`` is, or would be made."""
    for parent in (folder.absolute(), *folder.absolute().parents):
        if parent.is_dir():
            return shutil.disk_usage(parent).free
    return None


def _nvme_free(config: TuneConfig) -> int | None:
    path = config.offload.path
    return None if path is None else free_bytes(Path(path).expanduser())
