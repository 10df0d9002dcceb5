"""The GPU of a rank: what it is called, whether those of several ranks reach one another, and what of its memory is free."""

from __future__ import annotations

import logging

import torch

from host import limits

_LOG = logging.getLogger(__name__)
_GIB = 1 << 30


def uuid_of(device: torch.device) -> str:
    """The name by which the driver knows a GPU, ``GPU-…``; empty for a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""


def name_of(device: torch.device) -> str:
    """What a device is called in messages: of a GPU with its model, and the name by which the system's log knows it."""
    if device.type != "cuda":
        return f"the {device.type}"
    return f"{device} ({torch.cuda.get_device_properties(device).name}, {uuid_of(device)})"


def free_bytes(device: torch.device) -> int:
    """What of the memory that a rank computes in is free."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else limits.memory_available()


def tell(device: torch.device, rank: int, size: int) -> None:
    """Log which GPU a rank has, and on rank 0 whether those of this machine's ranks reach one another's memory."""
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_properties(device)
    _LOG.info(
        "rank %d has %s: %.1f GiB, compute capability %d.%d",
        rank, name_of(device), found.total_memory / _GIB, found.major, found.minor,
    )  # fmt: skip
    if rank == 0 and size > 1:
        _LOG.info("%s", exchange_of(min(size, torch.cuda.device_count())))


def exchange_of(count: int) -> str:
    """Whether the first GPUs of this machine reach one another's memory, in words."""
    apart = [
        f"{one} and {other}"
        for one in range(count)
        for other in range(one + 1, count)
        if not (torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one))
    ]
    if not apart:
        return f"all {count} GPUs reach one another's memory (peer-to-peer)"
    return (
        f"no peer-to-peer between GPUs {', '.join(apart)}: what they exchange goes through the host's memory, which is slower"
    )
