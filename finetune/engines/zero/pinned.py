"""What DeepSpeed pins of the host's memory, pinned exactly: it asks for one buffer after the other, of up to all of a rank's
weights, which take as much as half again in torch's powers of two.
"""

from __future__ import annotations

import torch
from deepspeed.utils import pin_memory as deepspeed_pins

from finetune.config import OffloadConfig
from finetune.machine.pinned import CudaDriver, Driver, PinnedMemory


def pin_offloaded(offload: OffloadConfig, device: torch.device) -> None:
    """Have what is offloaded from a GPU lie in memory that is pinned exactly; elsewhere nothing is pinned."""
    if device.type == "cuda" and (offload.optimizer, offload.parameters) != ("none", "none"):
        pin_exactly(CudaDriver())


def pin_exactly(driver: Driver) -> PinnedMemory:
    """Have DeepSpeed pin by a driver all the memory that it pins in this process from now on."""
    pinned = PinnedMemory(driver)
    deepspeed_pins.get_active_native_pinned_memory = lambda: pinned
    return pinned
