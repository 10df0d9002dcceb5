"""How torch takes memory of a GPU: in segments that grow, so that what is freed in small pieces is used by larger ones."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Final

from finetune.machine import cuda_devices

ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch reads its allocator's settings, when a process first takes a GPU's memory; the second wins over the first."""
_GROWING: Final = "expandable_segments"
_OF_ITS_OWN: Final = (_GROWING, "backend")
"""Settings that say how memory is taken."""
_MAPS_MEMORY: Final = 102
"""``CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`` of cuda.h."""


def let_segments_grow(environment: MutableMapping[str, str]) -> None:
    """Have torch take memory in segments that grow, unless the user's settings say how it is taken, or a GPU cannot.

    torch's default is blocks of fixed sizes, of which a training step leaves holes. To be called before this process takes
    memory of a GPU; asks CUDA's driver.
    """
    settings = with_growing_segments(environment)
    if settings and _gpus_map_memory():
        environment.update(settings)


def with_growing_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of torch's allocator, with segments that grow besides; none where the user's say how memory is taken."""
    given = {name: environment[name].strip(" ,") for name in ALLOCATOR if environment.get(name, "").strip(" ,")}
    named = {setting.partition(":")[0].strip() for settings in given.values() for setting in settings.split(",")}
    if named.intersection(_OF_ITS_OWN):
        return {}
    return {name: f"{settings},{_GROWING}:True" for name, settings in given.items()} or {ALLOCATOR[0]: f"{_GROWING}:True"}


def _gpus_map_memory() -> bool:
    """Whether all GPUs' memory can be mapped into addresses that are reserved; that of some virtual GPUs cannot."""
    try:
        able = cuda_devices.attribute(_MAPS_MEMORY)
    except (OSError, RuntimeError):
        return False
    return bool(able) and all(able)
