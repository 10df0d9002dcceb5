"""Steps that are captured once and replayed: as CUDA graphs, or as lists of operations on the CPU, by which they are tested.

What is captured reads and writes the same memory at each replay, and Python does not run again. So it may wait for nothing that
the device computes, make no tensor of numbers that the host has, and have no shape that depends on either.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from serve.model.cuda.memory import is_out_of_device_memory
from serve.model.dispatch import Watching

_WAITS: Final = frozenset(
    ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount")
)
"""Operations whose result, or whose shape, the host must wait for."""
FROM_HOST: Final = frozenset(("lift_fresh", "lift_fresh_copy", "lift"))
"""What ``torch.tensor`` does: a copy from the host, in a captured step of numbers that never change again."""
_FINE_STEP: Final = 16


def graph_sizes(most: int) -> tuple[int, ...]:
    """Rows of the steps that are captured, ascending: 1, 2, 4, 8, then multiples of 16, and ``most`` itself.

    They follow from ``most`` alone, so that all ranks capture the same sizes.
    """
    return tuple(sorted({size for size in (1, 2, 4, 8, *range(_FINE_STEP, most, _FINE_STEP)) if size < most} | {most}))


def size_for(sizes: Sequence[int], rows: int) -> int | None:
    """The least of some ascending sizes that has room for so many rows; ``None`` where none has."""
    place = bisect_left(sizes, rows)
    return sizes[place] if place < len(sizes) else None


def waits_for_device(operation: Any, arguments: Sequence[object]) -> bool:
    """Whether the host waits for the device in an operation, as ``TorchDispatchMode`` sees it."""
    name = operation.overloadpacket.__name__
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):  # a mask's places are counted first
        return any(isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(arguments[1]))
    if name == "repeat_interleave":
        return len(arguments) < 2 or isinstance(arguments[1], Tensor)
    if name == "histc":  # without a range, which it then looks for among the numbers
        low, high = (*arguments[2:4], 0, 0)[:2]
        return low == high
    return name in _WAITS


class CaptureError(RuntimeError):
    """A step cannot be captured."""


class Graph(Protocol):
    """A captured step."""

    def capture(self, step: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Keep what the step does, which has run before.

        Returns:
            Its results, whose contents each ``replay`` writes anew.
        """
        ...

    def replay(self) -> None:
        """Do it again, with what its inputs hold now."""
        ...


def _behind(error: BaseException) -> Iterator[BaseException]:
    """An error, what was raised when it was raised, and so on."""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__context__


class CudaGraph:
    """A CUDA graph; those that are made with one pool share their memory.

    While its results are held, only the replay of one that was captured before overwrites them: they may lie in what that had
    let go of.
    """

    def __init__(self, pool: Any) -> None:
        """``pool``: of ``torch.cuda.graph_pool_handle``."""
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, step: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Keep what the step, which has run before, launches on the device.

        Returns:
            Its results, whose contents each ``replay`` writes anew.

        Raises:
            CaptureError: the step does what a graph cannot hold.
            torch.OutOfMemoryError: the device has no room for what it makes.
        """
        # NCCL's watchdog asks events of its own thread about its work, which the other modes forbid.
        try:
            with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                return step()
        except RuntimeError as error:
            # torch ends the capture before it hands on what broke it off, and then says that alone.
            said = list(_behind(error))
            full = next((each for each in said if is_out_of_device_memory(each)), None)
            if full is not None:
                raise torch.OutOfMemoryError(str(full)) from error
            raise CaptureError("; then: ".join(str(each) for each in reversed(said))) from error

    def replay(self) -> None:
        """Launch all that was captured again, with what its inputs hold now; does not wait for the device."""
        self._graph.replay()


class CpuGraph:
    """The operations of a step on the CPU, done again in their order: what Python computed stays as it was, as in a CUDA graph.

    Kernels that are called past torch's dispatcher are not seen, so a step must have none. It is as slow as the step itself.

    Graphs of one pool share no memory, but spoil one another's results as those of CUDA may: who reads what is not there any
    more gets no number.
    """

    def __init__(self, pool: list[ReferenceType[CpuGraph]] | None = None) -> None:
        """``pool``: the graphs that stand for those of one CUDA pool, in the order of their capture; one of its own without."""
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self._pool = [] if pool is None else pool
        self._results: list[Tensor] = []
        """Those that are in no memory of others."""

    @torch.inference_mode()
    def capture(self, step: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Keep the operations of the step, which has run before.

        Returns:
            Its results, whose contents each ``replay`` writes anew.

        Raises:
            CaptureError: the step does what a CUDA graph cannot hold.
        """
        with _Recorder(self._operations):
            results = step()
        own = {_place(tensor) for *_, kept in self._operations for tensor in kept}
        self._results = [result for result in results if _place(result) in own]
        self._pool.append(ref(self))
        return results

    @torch.inference_mode()
    def replay(self) -> None:
        """Do the operations again, in their order, with what the step's inputs hold now; results are written in place."""
        self._spoil_later()
        for operation, arguments, options, kept in self._operations:
            results = tree_leaves(operation(*arguments, **options))
            for result in results:
                if isinstance(result, torch.ScriptObject):  # the work of a collective, which its caller waited for
                    result.wait()  # type: ignore[attr-defined]  # bound by torch.distributed
            for old, new in zip(kept, (leaf for leaf in results if isinstance(leaf, Tensor)), strict=False):
                old.copy_(new)

    def _spoil_later(self) -> None:
        """Overwrite the results of the graphs that were captured after this one.

        On CUDA they may lie where this one has what it needs on the way, which was free again by then; and this one's results
        lie where nobody else's are, as they were held while the others were captured.
        """
        graphs = [graph for each in self._pool if (graph := each()) is not None]
        for graph in graphs[graphs.index(self) + 1 :]:
            for result in graph._results:
                if result.is_floating_point():
                    result.fill_(math.nan)
                elif result.dtype == torch.bool:
                    result.logical_not_()
                else:
                    result.fill_(-1)


def graphs_of(device: torch.device) -> Callable[[], Graph]:
    """What makes graphs that share their memory, on this device."""
    if device.type != "cuda":
        spoiled: list[ReferenceType[CpuGraph]] = []
        return lambda: CpuGraph(spoiled)
    torch.cuda.synchronize(device)
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)


class _Recorder(Watching):
    def __init__(self, operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]]) -> None:
        super().__init__()
        self._operations = operations

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if waits_for_device(func, args) or func.overloadpacket.__name__ in FROM_HOST:
            raise CaptureError(f"{func} cannot be captured: the host waits for the device, or hands it numbers of its own")
        out = func(*args, **options)
        given = {_place(leaf) for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)}
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable or func.namespace == "c10d":  # collectives change their tensors, and do not say so
            self._operations.append((func, args, options, []))
        elif any(_place(result) not in given for result in results):
            # Held from here on, so that no later result gets the same memory. Views stay what they are.
            self._operations.append((func, args, options, results))
        return out


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
