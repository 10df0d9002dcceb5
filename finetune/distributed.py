"""What a rank knows of the others: its place among them, and what all of them are told. No DeepSpeed here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that hold pieces of the same tensors, this one among them, in the order of the pieces."""

    rank: int
    """This one's place among them."""
    size: int
    group: dist.ProcessGroup | None = None
    """``None``: all ranks there are, or this one alone if ``size`` is 1."""

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Self:
        """The ranks of a process group; of all."""
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    @classmethod
    def alone(cls) -> Self:
        """This rank, which holds everything itself."""
        return cls(0, 1)

    def add_up(self, tensor: torch.Tensor) -> None:
        """Sum over all peers, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)

    def collect(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Each peer's tensor, all of one shape."""
        if self.size == 1:
            return [tensor]
        everyone = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(everyone, tensor, group=self.group)
        return everyone

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, received_sizes: list[int], sent_sizes: list[int]) -> None:
        """Send a piece of ``sent`` to each peer, and fill ``received`` with the pieces they send."""
        if self.size == 1:
            received.copy_(sent)
        else:
            dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self.group)


@dataclass(frozen=True, slots=True)
class Grid:
    """Where a rank stands in a pipeline: ranks are numbered stage by stage, and within a stage by their share of the data."""

    rank: int
    data_ranks: int
    """Ranks of one stage; each takes other samples."""

    @property
    def stage(self) -> int:
        return self.rank // self.data_ranks

    @property
    def data_rank(self) -> int:
        return self.rank % self.data_ranks

    def rank_of(self, stage: int, data_rank: int = 0) -> int:
        """The rank on ``stage`` with that share of the data."""
        return stage * self.data_ranks + data_rank


def random_state(device: torch.device) -> torch.Tensor:
    """State of the device's random numbers, uint8."""
    return torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the device's generator."""
    torch.cuda.set_rng_state(state) if device.type == "cuda" else torch.set_rng_state(state)


def tell_everyone(text: str) -> str:
    """Rank 0's ``text`` on every rank, sent as bytes. Every rank calls it, and waits for the others."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, 0)
    if dist.get_rank() != 0:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, 0)
    return bytes(data.cpu().tolist()).decode()
