"""Steps on the CPU as lists of kernels' calls: recorded while one is computed, replayed without Python between the calls.

What is recorded is what transformers' modules do: each call of a kernel of ours as a ``Job``, each operation of torch as a job
where a kernel computes the same bits, else as itself. A replay reads its inputs and writes its results where the recorded step
did. So a step may make no tensor of numbers that the host has, wait for no number, and have no shape that depends on one.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from serve.model.cuda.graphs import FROM_HOST, CaptureError, waits_for_device
from serve.model.dispatch import Watching

T = TypeVar("T")
KINDS: Final = (
    "product", "quantized", "rounded", "attention", "add", "multiply", "layer_norm", "rms_norm", "look_up", "widen", "sum",
)  # fmt: skip
"""``Kind`` of kernels/parts.h, in its order."""
NO_SOCKET: Final = -1
_ALIGNMENT_BYTES: Final = 64
_SLOT_BYTES: Final = 256
"""Memory of a step is given in multiples of this."""


class Job(ctypes.Structure):
    """``Job`` of kernels/parts.h: one call of a kernel."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("epsilon", ctypes.c_double),
        ("plain", ctypes.c_void_p),
        ("panels", ctypes.c_void_p),
        ("num_panels", ctypes.c_int64),
    )


_recorders: list[Recorder] = []
"""The one that records, if any: of the one thread that computes steps."""


def active() -> Recorder | None:
    """Who wants to know of every call of a kernel."""
    return _recorders[-1] if _recorders else None


def anew(function: Callable[..., object], *arguments: object) -> None:
    """Do something that Python must do again in every replay, whatever it does with torch."""
    if not _recorders:
        function(*arguments)
    else:
        _recorders[-1].by_python(partial(function, *arguments))


class Steps:
    """The kernel that carries jobs out."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        """``kernels`` as ``load_cpu_kernels`` gives them."""
        self._steps = kernels.tessera_steps
        self._steps.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int)
        self._steps.restype = ctypes.c_bool

    def one(self, job: Job) -> None:
        """Carry one out, and let whoever records know."""
        self._steps(ctypes.addressof(job), 1, torch.get_num_threads(), NO_SOCKET)
        if _recorders:
            _recorders[-1].note(job)

    def all(self, jobs: ctypes.Array[Job], socket: int) -> bool:
        """Carry these out, one after the other, until a message that overtakes them waits at a socket; whether none did."""
        return bool(self._steps(ctypes.addressof(jobs), len(jobs), torch.get_num_threads(), socket))


class StepMemory:
    """Memory for what recorded steps make: a tensor's is given again when nothing refers to it any more.

    Replays make their tensors in the order of the recording, so what took turns in a place does so again. Several recordings
    share it, where what one has left is not read after another's replay.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray[Any, Any]]] = {}
        self.num_bytes = 0
        """What all of it takes."""

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same type, shape and strides, whose numbers are not set."""
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        count = reach if tensor.numel() else 0
        flat = self._slot(count * tensor.itemsize).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of this shape and type, whose numbers are not set."""
        count = math.prod(shape)
        return self._slot(count * dtype.itemsize).view(dtype)[:count].view(tuple(shape))

    def _slot(self, count: int) -> Tensor:
        size = max(1, -(-count // _SLOT_BYTES)) * _SLOT_BYTES
        free = self._free.setdefault(size, [])
        if free:
            slot = free.pop()
        else:
            raw = np.empty(size + _ALIGNMENT_BYTES, dtype=np.uint8)
            self.num_bytes += size
            begin = -raw.ctypes.data % _ALIGNMENT_BYTES
            slot = raw[begin : begin + size]
        held = slot[:]  # an array of its own, which ends with the last tensor over it
        weakref.finalize(held, free.append, slot).atexit = False
        return torch.from_numpy(held)


class _Again:
    """An operation of torch, whose results go where they went when it was recorded."""

    __slots__ = ("_arguments", "_kept", "_operation", "_options")

    def __init__(self, operation: Any, arguments: Any, options: Any, kept: list[tuple[int, Tensor]]) -> None:
        self._operation, self._arguments, self._options, self._kept = operation, arguments, options, kept

    def __call__(self) -> None:
        results = tree_leaves(self._operation(*self._arguments, **self._options))
        for place, old in self._kept:
            old.copy_(results[place])


class Program:
    """The jobs and calls of a recorded step, which can be carried out again."""

    def __init__(self, steps: Steps, recorded: Sequence[Job | Callable[[], object]], held: Sequence[object]) -> None:
        self._steps = steps
        self._parts: list[ctypes.Array[Job] | Callable[[], object]] = []
        self._held = held
        jobs: list[Job] = []
        for item in (*recorded, None):
            if isinstance(item, Job):
                jobs.append(item)
                continue
            if jobs:
                self._parts.append((Job * len(jobs))(*jobs))
                jobs = []
            if item is not None:
                self._parts.append(item)

    @property
    def parts(self) -> int:
        """How often Python has a part in a replay; 1 where all is kernels' calls."""
        return len(self._parts)

    @property
    def jobs(self) -> ctypes.Array[Job] | None:
        """All that is carried out, where that is kernels' calls and nothing else; a replay takes what they are set to."""
        return self._parts[0] if len(self._parts) == 1 and isinstance(self._parts[0], ctypes.Array) else None

    def replay(self, socket: int = NO_SOCKET) -> bool:
        """Do again what was recorded, with what the inputs hold now.

        Args:
            socket: where a message may come that overtakes it; see ``serve.worker.wire.send``.

        Returns:
            False if such a message waits there, and this was given up in the middle.
        """
        for part in self._parts:
            if not isinstance(part, ctypes.Array):
                part()
            elif not self._steps.all(part, socket):
                return False
        return True


class Recorder(Watching):
    """Records what is done within, as a context; gradients must be off."""

    def __init__(self, steps: Steps, memory: StepMemory) -> None:
        super().__init__()
        self.steps, self.memory = steps, memory
        self.torch_operations: set[str] = set()
        """Names of those that no kernel computes."""
        self._recorded: list[Job | Callable[[], object]] = []
        self._held: list[object] = []
        self._paused = False

    def __enter__(self) -> Recorder:
        super().__enter__()  # type: ignore[no-untyped-call]  # likewise
        _recorders.append(self)
        return self

    def __exit__(self, *raised: Any) -> None:
        _recorders.pop()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # likewise

    def program(self) -> Program:
        """The program of all that was recorded so far."""
        return Program(self.steps, self._recorded, self._held)

    def note(self, job: Job, *held: object) -> None:
        """A kernel was called. ``held``: what the job refers to and nothing else keeps."""
        if self._paused:
            return
        self._recorded.append(job)
        self._held.extend(held)

    def hold(self, what: object) -> None:
        """Keep something as long as the recording."""
        self._held.append(what)

    def by_python(self, call: Callable[[], object]) -> None:
        """Call something now, recording none of what it does, and have each replay call it again; see ``anew``."""
        self.unrecorded(call)
        self._recorded.append(call)

    def unrecorded(self, call: Callable[[], T]) -> T:
        """Call something now, recording none of what it does: of what it makes, a replay has another by then."""
        before, self._paused = self._paused, True
        try:
            return call()
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if self._paused:
            return func(*args, **options)
        if func in _BLANK:
            return self.memory.like(func(*args, **options))
        if waits_for_device(func, args) or func.overloadpacket.__name__ in FROM_HOST:
            raise CaptureError(f"{func} needs numbers of the host, or the host needs its numbers")
        if func in _BY_KERNEL:
            out = _BY_KERNEL[func](self, *args, **options)
            if out is not None:
                return out
        return self._by_torch(func, args, options)

    def _by_torch(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        given = {_place(leaf) for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)}
        out = func(*args, **options)
        if func._schema.is_mutable:
            self._recorded.append(_Again(func, args, options, []))
            return out
        leaves = tree_leaves(out)
        made = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and _place(leaf) not in given]
        if not made:  # a view stays one
            return out
        self.torch_operations.add(str(func))
        kept = {id(leaves[i]): self.memory.like(leaves[i]) for i in made}
        for i in made:
            kept[id(leaves[i])].copy_(leaves[i])
        self._recorded.append(_Again(func, args, options, [(i, kept[id(leaves[i])]) for i in made]))
        return tree_map_only(Tensor, lambda leaf: kept.get(id(leaf), leaf), out)


def _place(tensor: Tensor) -> int:
    # A weight in a library's own layout (oneDNN's) lies nowhere that another tensor could.
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else -id(tensor)


def row_stride(tensor: Tensor, width: int) -> int | None:
    """Numbers from one row of a tensor to the next, ``width`` being its last size; 0 of one row, ``None`` if they differ."""
    if tensor.dim() == 0 or tensor.shape[-1] != width or (width > 1 and tensor.stride(-1) != 1):
        return None
    several = [place for place in range(tensor.dim() - 1) if tensor.shape[place] > 1]
    if not several:
        return 0
    if len(several) == 1:
        return tensor.stride(several[0])
    return width if tensor.is_contiguous() else None


def _computable(*tensors: object) -> bool:
    return all(
        isinstance(tensor, Tensor) and tensor.dtype in (torch.float32, torch.bfloat16) and tensor.device.type == "cpu"
        for tensor in tensors
    )


def _of_two(kind: str, recorder: Recorder, x: Any, y: Any, *, alpha: float = 1, into: Tensor | None = None) -> Tensor | None:
    """A sum or a product of two tensors of the same shape, or of one and a row for each of its own."""
    if alpha != 1 or not _computable(x, y) or x.dtype is not y.dtype:
        return None
    if x.dim() < y.dim() and into is None:
        x, y = y, x
    if x.dim() == 0 or not (x.shape == y.shape or y.numel() == x.shape[-1]):
        return None
    width = x.shape[-1]
    x_stride, y_stride = row_stride(x, width), row_stride(y, width)
    if x_stride is None or y_stride is None or x.numel() == 0:
        return None
    out = recorder.memory.empty(x.shape, x.dtype) if into is None else into
    job = Job(kind=KINDS.index(kind), is_bf16=x.dtype is torch.bfloat16, x=x.data_ptr(), y=y.data_ptr(), out=out.data_ptr())
    job.rows, job.width, job.x_stride, job.y_stride = x.numel() // width, width, x_stride, y_stride
    job.out_stride = width if into is None else x_stride
    recorder.steps.one(job)
    return out


def _times(recorder: Recorder, x: Any, y: Any) -> Tensor | None:
    """A product of two tensors, or of one and a number that is exact in its type, which then stands in a row of its own."""
    if isinstance(y, float) and _computable(x) and x.dim() and float(torch.tensor(y, dtype=x.dtype)) == y:
        y = torch.full(x.shape[-1:], y, dtype=x.dtype)  # in no memory of the step: what had it before writes there in a replay
        recorder.hold(y)
    return _of_two("multiply", recorder, x, y)


def _add_in_place(recorder: Recorder, x: Any, y: Any, *, alpha: float = 1) -> Tensor | None:
    return _of_two("add", recorder, x, y, alpha=alpha, into=x) if isinstance(x, Tensor) else None


def _look_up(recorder: Recorder, table: Tensor, ids: Tensor, *_: object) -> Tensor | None:
    if (
        not _computable(table)
        or table.dim() != 2
        or table.stride(1) != 1
        or ids.dtype != torch.int64
        or not ids.is_contiguous()
    ):
        return None
    width = table.shape[1]
    out = recorder.memory.empty((*ids.shape, width), table.dtype)
    job = Job(kind=KINDS.index("look_up"), is_bf16=table.dtype is torch.bfloat16, y=ids.data_ptr(), out=out.data_ptr())
    job.weight, job.rows, job.width, job.inputs, job.out_stride = table.data_ptr(), ids.numel(), width, table.stride(0), width
    recorder.steps.one(job)
    return out


def _widen(recorder: Recorder, x: Tensor, dtype: torch.dtype | None = None, *more: object, **others: object) -> Tensor | None:
    """A copy in fp32 of numbers in bf16."""
    if x.dtype is not torch.bfloat16 or dtype is not torch.float32 or any((*more, *others.values())) or not _computable(x):
        return None
    width = x.shape[-1] if x.dim() else 0
    stride = row_stride(x, width) if x.numel() else None
    if stride is None:
        return None
    out = recorder.memory.empty(x.shape, dtype)
    job = Job(kind=KINDS.index("widen"), x=x.data_ptr(), out=out.data_ptr(), rows=x.numel() // width, width=width)
    job.x_stride, job.out_stride = stride, width
    recorder.steps.one(job)
    return out


_ATEN: Final = torch.ops.aten
_BLANK: Final = frozenset(
    (
        _ATEN.empty.memory_format,
        _ATEN.empty_like.default,
        _ATEN.new_empty.default,
        _ATEN.empty_strided.default,
        _ATEN.new_empty_strided.default,
    )
)
"""Operations that make a tensor and set no number in it."""
_BY_KERNEL: Final[dict[object, Callable[..., Tensor | None]]] = {
    _ATEN.add.Tensor: partial(_of_two, "add"),
    _ATEN.mul.Tensor: _times,
    _ATEN.add_.Tensor: _add_in_place,
    _ATEN.embedding.default: _look_up,
    _ATEN.to.dtype: _widen,  # in inference mode what it is made of is not seen
    _ATEN._to_copy.default: _widen,
}
"""What computes the same bits as an operation of torch, or ``None`` of arguments that it does not take."""
