"""Inputs of blocks that wait in pinned host memory for the backward pass, copied there beside what the device computes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from finetune.machine.pinned import CudaDriver, PinnedMemory

_LEAVING: Final = 2
"""Tensors that may be on the device and on their way to the host."""


class Copies(Protocol):
    """What copies between a device and the host. An event is whatever says that a copy is over."""

    def out(self, tensor: Tensor, host: Tensor, after: Any) -> Any:
        """Begin to copy a tensor to the host, once ``after`` has come if there is one. Returns the event of its end."""
        ...

    def back(self, host: Tensor, device: torch.device, after: Any) -> tuple[Tensor, Any]:
        """A tensor of the device that what is computed from now on finds filled, and the event of its copy's end."""
        ...


class CudaCopies:
    """To the host on a stream of their own, back on that of what is computed. The host waits for neither.

    What is computed waits for a copy to the host when the second one after it begins, and only then is the tensor let go of: so
    no more than two wait on the device, however far ahead of it the host is.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._leaving: deque[tuple[Tensor, Any]] = deque()
        """What is copied to the host, and the events of that."""

    def out(self, tensor: Tensor, host: Tensor, after: Any) -> Any:
        """Begin to copy a tensor when all that was launched before is done; it may be let go of at once."""
        stream = self._streams.get(tensor.device)
        if stream is None:
            stream = self._streams[tensor.device] = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        there = stream.record_event()
        self._leaving.append((tensor, there))
        self._let_go(_LEAVING)
        return there

    def back(self, host: Tensor, device: torch.device, after: Any) -> tuple[Tensor, Any]:
        """The tensor in memory of the current stream, on which the copy takes its turn."""
        self._let_go(0)
        current = torch.cuda.current_stream(device)
        current.wait_event(after)
        return host.to(device, non_blocking=True), current.record_event()

    def _let_go(self, kept: int) -> None:
        """Let what is computed from now on have the memory of all but so many, when they are copied."""
        while len(self._leaving) > kept:
            tensor, there = self._leaving.popleft()
            torch.cuda.current_stream(tensor.device).wait_event(there)


@dataclass(slots=True)
class _Buffer:
    """Pinned bytes, and what must have come before they are written anew."""

    bytes_B: Tensor
    last_read: Any = None


class _Waiting:
    """A tensor on the host. Its buffer is free again when autograd has let go of it."""

    def __init__(self, tensor: Tensor, owner: HostInputs) -> None:
        self._device, self._owner = tensor.device, owner
        self._buffer = owner.take(tensor.numel() * tensor.element_size())
        self._host = self._buffer.bytes_B.view(tensor.dtype).view(tensor.shape)
        self._is_there = owner.copies.out(tensor, self._host, self._buffer.last_read)
        self._buffer.last_read = self._is_there

    def back(self) -> Tensor:
        tensor, self._buffer.last_read = self._owner.copies.back(self._host, self._device, self._is_there)
        return tensor

    def __del__(self) -> None:
        buffer: _Buffer | None = getattr(self, "_buffer", None)
        if buffer is not None:
            self._owner.give_back(buffer)


class HostInputs:
    """Keeps what autograd saves on the host, in buffers of exactly its size that later steps use again.

    As many are pinned as wait at once. Where other sizes come, what is free of the sizes before is given back first.
    """

    def __init__(self, memory: PinnedMemory, copies: Copies, device_type: str = "cuda") -> None:
        """
        Args:
            device_type: of the tensors that are moved; others stay where they are.
        """
        self.copies = copies
        self._memory = memory
        self._device_type = device_type
        self._free: dict[int, list[_Buffer]] = {}
        """Buffers that nothing waits in, by their bytes."""

    @property
    def num_bytes(self) -> int:
        """What is pinned now, whole pages."""
        return self._memory.num_bytes

    def hooks(self) -> saved_tensors_hooks:
        """A context within which autograd saves here."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def take(self, num_bytes: int) -> _Buffer:
        """A buffer of so many bytes.

        Raises:
            RuntimeError: no more memory can be pinned.
        """
        free = self._free.get(num_bytes)
        if free:
            return free.pop()
        self._free.clear()  # of other sizes: it is unpinned with them
        return _Buffer(self._memory.pin_empty(torch.empty(0, dtype=torch.uint8), (num_bytes,)))

    def give_back(self, buffer: _Buffer) -> None:
        """Let others have a buffer."""
        self._free.setdefault(buffer.bytes_B.numel(), []).append(buffer)

    def _pack(self, tensor: Tensor) -> Tensor | _Waiting:
        if tensor.device.type != self._device_type or tensor.numel() == 0:
            return tensor
        return _Waiting(tensor, self)

    @staticmethod
    def _unpack(packed: Tensor | _Waiting) -> Tensor:
        return packed.back() if isinstance(packed, _Waiting) else packed


@cache
def cuda_inputs() -> HostInputs:
    """What keeps inputs of blocks on the host, of all GPUs that this process computes on; made when it is first asked for."""
    return HostInputs(PinnedMemory(CudaDriver()), CudaCopies())
