"""What both engines are: one of the ranks that train together, and what all of them agree on."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from finetune.distributed import random_state, set_random_state


class _Engine(Protocol):
    """What is asked of DeepSpeed's engines here, of either kind."""

    def destroy(self) -> None: ...


class EngineBase:
    """One of the ranks that train together. Every method is collective: all ranks call it, in the same order."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = device

    def agree(self, good: bool) -> bool:
        """Whether ``good`` is true on every rank."""
        return self._sum(float(not good))[0] == 0

    def rng_states(self) -> list[torch.Tensor]:
        """The random state of every rank's device, uint8, by rank."""
        mine = random_state(self.device).to(self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        return [state.cpu() for state in everyone]

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set this rank's random state."""
        set_random_state(self.device, state)

    def _sum(self, *values: float) -> list[float]:
        """Each value added up over all ranks, in fp64."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor]

    def _leave(self, engine: _Engine) -> None:
        """Free DeepSpeed's engine, and leave when all do."""
        engine.destroy()
        dist.barrier()
        dist.destroy_process_group()
