"""Memory that the ranks of one machine share: sums, gathers and tokens at the price of a few microseconds, without a socket."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from serve.model.recording import KINDS, Job, Steps

_SUM: Final = KINDS.index("sum")

# Shapes.  R rows   V vocabulary columns


class SharedMemory:
    """The kernels of ``kernels/group.cpp`` over a file without a name, which ends with the last of the ranks.

    All ranks must call the same methods in the same order with tensors of the same sizes. A call waits for the others, however
    long they take: who watches the ranks knows which of them does not come.
    """

    def __init__(
        self, kernels: ctypes.CDLL, descriptor: int, rank: int, size: int, begun: ctypes.c_int64 | None = None
    ) -> None:
        """Map it.

        Args:
            kernels: as ``load_cpu_kernels`` gives them.
            descriptor: of a memory file that was empty when the first rank came; it may be closed afterwards.
            begun: counts the sums that this rank has begun, in replays of recorded steps too.

        Raises:
            OSError: it cannot be mapped.
        """
        whole, place, number = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
        kernels.tessera_group_open.argtypes = (number, number, number)
        kernels.tessera_group_open.restype = place
        kernels.tessera_group_close.argtypes = (place,)
        kernels.tessera_group_close.restype = None
        kernels.tessera_group_gather.argtypes = (place, place, whole, ctypes.POINTER(whole), place)
        kernels.tessera_group_gather.restype = None
        kernels.tessera_group_tell.argtypes = (place, place, whole)
        kernels.tessera_group_tell.restype = None
        self._kernels = kernels
        self._steps = Steps(kernels)
        self._begun = ctypes.c_int64() if begun is None else begun
        self._rank = rank
        self._group = kernels.tessera_group_open(descriptor, rank, size)
        if self._group is None:
            raise OSError("the ranks' shared memory cannot be mapped")

    @staticmethod
    def takes(tensor: Tensor) -> bool:
        """Whether ``sum_`` can add it up; ranks agree, since their tensors are alike."""
        return tensor.dtype in (torch.float32, torch.bfloat16) and tensor.is_contiguous() and tensor.device.type == "cpu"

    def sum_(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place; in bf16 added in fp32 and rounded once. Every rank gets the same bits.

        It is a job of its own: replays of a recorded step do it without Python.
        """
        assert self.takes(tensor), "the kernel sees addresses alone"
        job = Job(kind=_SUM, is_bf16=tensor.dtype is torch.bfloat16, x=self._group, y=ctypes.addressof(self._begun))
        job.out, job.width = tensor.data_ptr(), tensor.shape[-1] if tensor.dim() else 1
        job.rows = tensor.numel() // max(job.width, 1)
        self._steps.one(job)

    def gather_columns(self, tensor_RV: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Rank 0 gets the ranks' columns side by side in fp32, [R, sum of widths]; the others get ``None``."""
        own = tensor_RV.float().contiguous()
        rows, columns = own.shape
        assert columns == widths[self._rank], f"{columns} columns; rank {self._rank} has {widths[self._rank]}"
        out = torch.empty(rows, sum(widths)) if self._rank == 0 else None
        each = (ctypes.c_int64 * len(widths))(*widths)
        self._kernels.tessera_group_gather(self._group, own.data_ptr(), rows, each, None if out is None else out.data_ptr())
        return out

    def numbers_of_first(self, numbers: Sequence[int]) -> list[int]:
        """Rank 0's numbers, of 64 bits, on every rank; all bring as many."""
        told = (ctypes.c_int64 * len(numbers))(*numbers)
        self._kernels.tessera_group_tell(self._group, told, ctypes.sizeof(told))
        return list(told)

    def close(self) -> None:
        """Unmap it; no method may be called afterwards."""
        group, self._group = self._group, None
        if group is not None:
            self._kernels.tessera_group_close(group)
