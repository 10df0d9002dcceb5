"""A recorded part of a step that can be carried out with another number of tokens than it was recorded with.

Everything in it lies token by token: of more tokens each tensor goes on behind its place, where memory is left for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from serve.model.attention import StepLayout
from serve.model.cuda.graphs import CaptureError
from serve.model.kernel_attention import CpuKernelBackend
from serve.model.recording import KINDS, NO_SOCKET, Recorder, StepMemory

_ATTENTION: Final = KINDS.index("attention")


def tokens_of(tensor: Tensor) -> int:
    """How many tokens a tensor [T] or [1, T, ...] has rows for; 0 of another shape."""
    if tensor.dim() == 1:
        return tensor.shape[0]
    return tensor.shape[1] if tensor.dim() > 1 and tensor.shape[0] == 1 else 0


class ElasticMemory(StepMemory):
    """Memory for tensors of some tokens, each with room for those of more."""

    def __init__(self, tokens: int, capacity: int) -> None:
        """
        Args:
            tokens: of the step that is recorded.
            capacity: for which there is room.
        """
        super().__init__()
        self.tokens, self.capacity = tokens, capacity

    def _slot(self, count: int) -> Tensor:
        return super()._slot(-(-count * self.capacity // self.tokens))


class Elastic:
    """What was recorded, with its inputs and its result."""

    def __init__(self, recorder: Recorder, memory: ElasticMemory, inputs: Sequence[Tensor], result: Tensor) -> None:
        """
        Args:
            inputs: contiguous, [T] or [1, T, ...], in the memory, as is the result.

        Raises:
            CaptureError: something in it does not lie token by token, or is done by Python.
        """
        self._program = recorder.program()
        jobs = self._program.jobs
        if jobs is None:
            raise CaptureError(f"Python has a part in them ({', '.join(sorted(recorder.torch_operations)) or 'a call'})")
        self._memory = memory  # the jobs write where tensors were that nothing refers to any more
        self.capacity, self.recorded_tokens = memory.capacity, memory.tokens
        self._inputs, self._result, self._tokens = inputs, result, memory.tokens
        self._attentions = [job for job in jobs if job.kind == _ATTENTION]
        self._by_rows = [(job, job.rows // memory.tokens) for job in jobs if job.kind != _ATTENTION]
        for job, rows in self._by_rows:
            if job.rows != rows * memory.tokens or rows == 0:
                raise CaptureError(f"{KINDS[job.kind]} has {job.rows} rows for {memory.tokens} tokens")
        for job in self._attentions:
            if not CpuKernelBackend.lies_by_token(job):
                raise CaptureError("heads lie before tokens")

    def replay(
        self, inputs: Sequence[Tensor], layout: StepLayout, backend: CpuKernelBackend, socket: int = NO_SOCKET
    ) -> Tensor | None:
        """The result for these inputs; ``None`` where it was overtaken, as ``Program.replay`` says.

        Args:
            inputs: of the same types and shapes, but for the number of tokens: up to ``capacity``.
        """
        tokens = tokens_of(inputs[0])
        assert tokens <= self.capacity, "there is no memory for so many"
        for own, given in zip(self._inputs, inputs, strict=True):
            _of_tokens(own, tokens).copy_(given)
        if tokens != self._tokens:
            for job, rows in self._by_rows:
                job.rows = rows * tokens
            self._tokens = tokens
        for job in self._attentions:
            backend.turn_to(job, layout)
        return _of_tokens(self._result, tokens) if self._program.replay(socket) else None


def _of_tokens(tensor: Tensor, tokens: int) -> Tensor:
    shape = (tokens,) if tensor.dim() == 1 else (1, tokens, *tensor.shape[2:])
    stride = tensor.stride() if tensor.dim() == 1 else (tokens * tensor.stride(1), *tensor.stride()[1:])
    return tensor.as_strided(shape, stride)
