"""The GPU of a rank: what it is called, whether those of several ranks reach one another, and what of its memory is free."""

from __future__ import annotations

import logging
import os

import torch

from host import limits
from serve.config import CacheConfig

_LOG = logging.getLogger(__name__)
_GIB = 1 << 30


def numbered(device: torch.device) -> torch.device:
    """A GPU by its number: the current one, where none was told. torch sets no device without."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def uuid_of(device: torch.device) -> str:
    """The name by which the driver knows a GPU, ``GPU-…``, or a slice of one, ``MIG-…``."""
    found = torch.cuda.get_device_properties(device)
    # A container's runtime gives a slice without that variable.
    is_slice = "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", "") or " MIG " in found.name
    return f"{'MIG' if is_slice else 'GPU'}-{found.uuid}"


def name_of(device: torch.device) -> str:
    """What a device is called in messages: of a GPU with its model, and the name by which the system's log knows it."""
    if device.type != "cuda":
        return f"the {device.type}"
    return f"{device} ({torch.cuda.get_device_properties(device).name}, {uuid_of(device)})"


def free_bytes(device: torch.device) -> int:
    """What of the memory that a rank computes in is free."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else limits.memory_available()


def bytes_left(device: torch.device, cache: CacheConfig, kept_bytes: int = 0) -> int:
    """What this process may still fill with tensors beside those it holds: of a GPU no more than ``take`` lets it have.

    Room that the allocator keeps and no tensor is in counts as free within that share, but for what is kept.

    Args:
        kept_bytes: what was kept free of a GPU when its blocks were counted: for steps and libraries.
    """
    free = free_bytes(device)
    if device.type != "cuda" or cache.kv_cache_gib is not None:
        return free
    share = int(cache.memory_fraction * torch.cuda.mem_get_info(device)[1])
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    return max(0, min(free + unused, share - allocated) - kept_bytes)


def reserved_bytes(device: torch.device) -> int:
    """What this process has taken of a GPU's memory for tensors; 0 of a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def give_back(device: torch.device) -> None:
    """Let others have what this process has taken of a GPU and holds no tensor in."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def take(device: torch.device, cache: CacheConfig) -> None:
    """Have this thread compute on a GPU from now on, and this process take no more of it than ``cache.memory_fraction``.

    So others' share of it stays theirs, and nothing comes to lie on the first GPU for want of a word.
    """
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    if cache.kv_cache_gib is None:
        torch.cuda.set_per_process_memory_fraction(cache.memory_fraction, device)


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
