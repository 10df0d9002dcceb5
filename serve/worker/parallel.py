"""The ranks of one model: how they meet, and what they exchange."""

from __future__ import annotations

import ctypes
import logging
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed import distributed_c10d

from serve.model.heads import Stage
from serve.model.recording import anew
from serve.worker.autotp import start_communication
from serve.worker.progress import Progress
from serve.worker.shared import SharedMemory

_LOG = logging.getLogger(__name__)
_ONLY_STAGE: Final = Stage()


class Ranks:
    """This rank's place among the ranks, and what they exchange: those of its own stage, and stages one with the next."""

    def __init__(
        self,
        rank: int,
        size: int,
        progress: Progress | None = None,
        memory: int | None = None,
        *,
        stage: Stage = _ONLY_STAGE,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """The process group of all ranks is there already, for more than one.

        Args:
            rank: place in the stage.
            size: ranks of each stage.
            progress: told of each exchange before it begins.
            memory: descriptor of a memory file that all ranks of the stage have, empty at first.
            group: the ranks of the stage; ``None`` where those are all.
        """
        self.rank = rank
        self.size = size
        self.stage = stage
        self.group = group
        self._control: dist.ProcessGroup | None = None
        self._sent: tuple[dist.Work, Tensor] | None = None
        self._progress = progress or Progress()
        self._memory = memory
        self._shared: SharedMemory | None = None

    @property
    def number(self) -> int:
        """This rank among all ranks, stage after stage."""
        return self.stage.number * self.size + self.rank

    @property
    def count(self) -> int:
        """Ranks of all stages."""
        return self.stage.count * self.size

    @property
    def answers(self) -> bool:
        """Whether this rank draws the tokens and tells the server: the first one of the last stage."""
        return self.rank == 0 and self.stage.is_last

    def share(self, kernels: ctypes.CDLL | None) -> None:
        """From now on, let a stage's ranks exchange activations through memory, if all ranks can, and not by the process group.

        Once is enough.

        Args:
            kernels: what does it; ``None`` where this rank has none.
        """
        if self.size == 1 or self._memory is None or self._shared is not None:
            return
        shared: SharedMemory | None = None
        if kernels is not None:
            try:
                shared = SharedMemory(kernels, self._memory, self.rank, self.size, self._progress.in_kernels)
            except OSError as error:
                _LOG.warning("rank %d exchanges activations by sockets, which is slower: %s", self.rank, error)
        if self.smallest(int(shared is not None)):
            self._shared = shared

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.size > 1 and self._shared is not None and self._shared.takes(tensor):
            self._shared.sum_(tensor)
        elif self.size > 1:
            anew(self._sum_by_group, tensor)
        return tensor

    def _sum_by_group(self, tensor: Tensor) -> None:
        self._progress.mark()
        dist.all_reduce(tensor, group=self.group)

    def gather_columns(self, tensor_RV: Tensor, widths: tuple[int, ...]) -> Tensor | None:
        """The stage's rank 0 gets its ranks' columns side by side, [R, sum of widths]; the others get ``None``."""
        if self.size == 1:
            return tensor_RV
        self._progress.mark()
        if self._shared is not None:
            return self._shared.gather_columns(tensor_RV, widths)
        # gloo wants equal shapes; the odd vocabulary's narrower shards travel with padding.
        padded = nn.functional.pad(tensor_RV, (0, max(widths) - tensor_RV.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else None
        dist.gather(padded, parts, dst=self.number - self.rank, group=self.group)
        return torch.cat([part[:, :w] for part, w in zip(parts, widths, strict=True)], dim=1) if parts else None

    def numbers_of_first(self, numbers: list[int], device: torch.device) -> list[int]:
        """The numbers of the rank that answers, on every rank; of what the others bring, only how many they are counts.

        Part of a step.
        """
        self._progress.mark()
        if self._shared is not None and self.stage.count == 1:
            return self._shared.numbers_of_first(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64, device=device)
        dist.broadcast(tensor, src=self.count - self.size)
        return [int(number) for number in tensor.tolist()]

    def tokens_of_first(self, tokens_K: Tensor) -> Tensor:
        """The tokens that the rank that answers has, int64, on every rank; the host waits for nothing on a GPU.

        Part of a step. What the others bring is written over.
        """
        if self.count > 1:
            self._progress.mark()
            dist.broadcast(tokens_K, src=self.count - self.size)
        return tokens_K

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """What the same rank of the stage before has handed on: the beginning of this stage's part of a step."""
        self._progress.reach(self.stage.number, self.stage.count)
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(tensor, src=self.number - self.size)
        self._progress.mark()
        return tensor

    def hand_on(self, tensor: Tensor) -> None:
        """Send a tensor to the same rank of the next stage, which takes it when it comes to this step."""
        if self._sent is not None:
            self._sent[0].wait()
        kept = tensor.contiguous()  # must stay as it is until it was sent
        work = dist.isend(kept, dst=self.number + self.size)
        assert work is not None, "this rank is one of those that send"
        self._sent = work, kept

    def end_step(self) -> None:
        """Say to whom watches that this rank is through with a step that has stages."""
        if self.stage.count > 1:
            self._progress.reach(self.stage.count, self.stage.count)

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' values, on every rank of every stage."""
        if self.count == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.int64)
        with self._progress.with_others():
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._control_group())
        return int(tensor)

    def all_say(self, yes: bool, device: torch.device) -> bool:
        """Whether every rank of every stage says yes. Of one stage it is part of a step, as sums are, and as quick as they."""
        if self.stage.count > 1:
            return self.smallest(int(yes)) == 1
        return int(self.sum_(torch.tensor(float(yes), device=device))) == self.size

    def told_by_first(self, text: str, stage: int = 0) -> str:
        """The text of a stage's first rank, on every rank of every stage; what the others bring counts for nothing."""
        if self.count == 1:
            return text
        first = stage * self.size
        encoded = text.encode() if self.number == first else b""
        group, count = self._control_group(), torch.tensor(len(encoded), dtype=torch.int64)
        with self._progress.with_others():
            dist.broadcast(count, src=first, group=group)
            letters = torch.tensor(list(encoded or bytes(int(count))), dtype=torch.uint8)
            dist.broadcast(letters, src=first, group=group)
        return bytes(letters.tolist()).decode()

    def _control_group(self) -> dist.ProcessGroup | None:
        """Small integers travel over gloo, whatever carries the activations."""
        if dist.get_backend() == "gloo":
            return None
        if self._control is None:
            self._control = dist.new_group(backend="gloo")
        return self._control

    def limit_exchanges(self, seconds: float) -> None:
        """From now on a rank ends when an exchange of GPUs takes so long; until now others may have had much to load.

        An exchange in a captured step is not seen by this limit: there, the server's own limit of a step ends the ranks.
        """
        if self.count > 1 and dist.get_backend() == "nccl":
            for group in dict.fromkeys((None, self.group)):  # of all ranks, and of the stage's
                distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def close(self) -> None:
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join_ranks(
    number: int,
    size: int,
    device: torch.device,
    rendezvous: Path | str,
    memory: int | None,
    timeout_seconds: float,
    progress: Progress,
    stages: int = 1,
) -> Ranks:
    """Meet the other ranks through a file that they all have open: no port is opened for it. ``memory`` is that of ``Ranks``.

    Rank ``number`` of all is one of the ``size`` of its stage: the first stage has the first ranks.
    Ranks of several nodes meet at ``tcp://HOST:PORT``, with ``/N`` behind it for rank 0, whose descriptor N listens there.
    The environment must hold LOCAL_RANK and DS_ACCELERATOR, which DeepSpeed reads.
    """
    count, stage = size * stages, Stage(number // size, stages)
    if count == 1:
        return Ranks(number, size, progress)
    group: dist.ProcessGroup | None = None
    with progress.with_others():
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            store=_store(str(rendezvous), number, count, timedelta(seconds=timeout_seconds)),
            rank=number,
            world_size=count,
            timeout=timedelta(seconds=timeout_seconds),
        )
        if stages > 1:  # every rank makes the groups of all stages, in the same order
            groups = [dist.new_group(range(first, first + size)) for first in range(0, count, size)]
            group = groups[stage.number]
        if size > 1:
            start_communication()
    return Ranks(number % size, size, progress, memory, stage=stage, group=group)


def _store(rendezvous: str, rank: int, size: int, timeout: timedelta) -> Store:
    if not rendezvous.startswith("tcp://"):
        return FileStore(rendezvous, size)
    place, _, listening = rendezvous.removeprefix("tcp://").partition("/")
    host, _, port = place.rpartition(":")
    descriptor = int(listening) if listening else None
    return TCPStore(
        host, int(port), size, rank == 0, timeout, wait_for_workers=False, master_listen_fd=descriptor, use_libuv=True
    )
