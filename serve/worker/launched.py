"""A step between its launch and the end of what is read of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from serve.engine.plan import PromptLogprobs, SequenceFault
from serve.types import SequenceId
from serve.worker.sampling.answers import LaunchedPrompt, LaunchedTokens


class LaunchedStep:
    """What one rank has launched of a step, and will read of it when the device has computed it."""

    def __init__(
        self,
        step: int,
        tokens: LaunchedTokens | None = None,
        prompts: Sequence[LaunchedPrompt] = (),
        *,
        on_device: bool = False,
        was_late: bool | None = None,
    ) -> None:
        """All of it was launched, on the current stream.

        Args:
            step: its number.
            tokens: on the rank that answers, where something is sampled.
            prompts: likewise, where logprobs of prompts are told.
            on_device: whether a CUDA device computes it, and the host is ahead of that.
            was_late: see ``StepResult``.
        """
        self.step: Final = step
        self.tokens: Final = tokens
        self.prompts: Final = prompts
        self.was_late: Final = was_late
        self.is_settled = False
        """Whether what is to be read of it was read."""
        self._end: torch.cuda.Event | None = None
        if on_device:
            self._end = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            self._end.record()

    def is_done(self) -> bool:
        """Whether the device has computed it."""
        return self._end is None or bool(self._end.query())  # type: ignore[no-untyped-call]  # torch leaves it unannotated

    def wait(self) -> None:
        """Wait until the device has computed it."""
        if self._end is not None:
            self._end.synchronize()

    def read_prompts(self) -> tuple[list[PromptLogprobs], dict[SequenceId, SequenceFault]]:
        """What can be told of prompt positions, and the sequences of which nothing can be; waits for the device."""
        results: list[PromptLogprobs] = []
        faults: dict[SequenceId, SequenceFault] = {}
        for part in self.prompts:
            told = part.read()
            if isinstance(told, SequenceFault):
                faults.setdefault(told.sequence, told)
            else:
                results.append(told)
        return results, faults
