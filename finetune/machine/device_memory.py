"""How torch takes memory of a GPU: in segments that grow, so that what is freed in small pieces is used by larger ones."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, MutableMapping
from typing import Final

ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch reads its allocator's settings, once, when a process first takes memory of a GPU; the second name is older."""
_GROWING: Final = "expandable_segments"
_OF_ITS_OWN: Final = (_GROWING, "backend")
"""Settings that say how memory is taken."""
_MAPS_MEMORY: Final = 102
"""``CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`` of cuda.h."""


def let_segments_grow(environment: MutableMapping[str, str]) -> None:
    """Have torch take memory in segments that grow, unless the user's settings say how it is taken, or the GPUs cannot.

    torch's default is blocks of fixed sizes, of which a training step leaves holes. To be called before this process takes
    memory of a GPU; asks CUDA's driver.
    """
    settings = allocator_settings(environment)
    if settings is not None and _gpus_map_memory():
        environment[ALLOCATOR[0]] = settings


def allocator_settings(environment: Mapping[str, str]) -> str | None:
    """The settings of torch's allocator with segments that grow; ``None`` where the user's say how memory is taken."""
    given = next((environment[name] for name in ALLOCATOR if environment.get(name)), "")
    named = {setting.partition(":")[0].strip() for setting in given.split(",")}
    if named.intersection(_OF_ITS_OWN):
        return None
    return f"{given},{_GROWING}:True" if given else f"{_GROWING}:True"


def _gpus_map_memory() -> bool:
    """Whether all GPUs' memory can be mapped into addresses that are reserved; that of some virtual GPUs cannot."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count, device, able = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return False
    for number in range(count.value):
        refused = driver.cuDeviceGet(ctypes.byref(device), number)
        if refused or driver.cuDeviceGetAttribute(ctypes.byref(able), _MAPS_MEMORY, device) or not able.value:
            return False
    return count.value > 0
