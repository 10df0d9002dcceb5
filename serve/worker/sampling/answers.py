"""What a step says of its rows, which the device may still be computing: nothing waits for it before it is read.

Shapes.  R rows   T columns of what was computed, R or more
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from serve.engine.plan import PromptLogprobs, Sampled, SequenceFault, Start
from serve.model.sending import Fetched, send
from serve.types import SequenceId
from serve.worker.sampling.logprobs import LaunchedLogprobs
from serve.worker.sampling.seen import Seen

_NOTHING_ALLOWED: Final = "allowed_ids, banned_ids and min_new_tokens leave no token to sample"


class SampledSequence(Protocol):
    """What a row of logits is about: a sequence, or one as it will be if proposed tokens come next."""

    @property
    def start(self) -> Start: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def supposed(self) -> int | None:
        """What the row before must give for this one to count; ``None`` where it counts in any case."""
        ...

    @property
    def is_read(self) -> bool:
        """Whether its last token is known to the host; otherwise ``seen`` is without it."""
        ...

    def seen(self) -> Seen: ...


class LaunchedTokens:
    """The next token of each of R rows."""

    __slots__ = ("_chosen_XT", "_columns", "_fetched", "_logprobs", "_num_tokens", "states")

    def __init__(
        self,
        chosen_XT: Tensor,
        states: Sequence[SampledSequence],
        columns: Sequence[int],
        logprobs: LaunchedLogprobs | None = None,
    ) -> None:
        """
        Args:
            chosen_XT: int64, in its first line tokens, in the second whether the largest logit was finite as it came, in the
                last whether it was after all that was changed.
            states: what each row is of, as it is now.
            columns: of ``chosen_XT``, one for each row.
            logprobs: of the rows that want some, in their order.
        """
        self.states: Final = states
        self._chosen_XT = chosen_XT
        self._columns = columns
        self._fetched = Fetched(chosen_XT)
        self._num_tokens = [state.num_tokens for state in states]
        self._logprobs = logprobs

    def of(self, states: Sequence[SampledSequence]) -> Tensor:
        """The tokens of some of the sequences, int64 on the device; the host waits for nothing."""
        column_of = {id(state): column for state, column in zip(self.states, self._columns, strict=True)}
        columns = [column_of[id(state)] for state in states]
        if columns == list(range(len(columns))):
            return self._chosen_XT[0, : len(columns)]
        return self._chosen_XT[0].index_select(0, send(torch.tensor(columns), self._chosen_XT.device))

    def read(self) -> tuple[list[Sampled], list[SequenceFault]]:
        """Wait for the device and tell them; rows whose logits are not finite, or where nothing is allowed, become faults.

        Rows that suppose a token count up to the first that was not chosen, or has a fault.
        """
        lines = self._fetched.tolist()
        tokens, finite, possible = ([line[column] for column in self._columns] for line in (lines[0], lines[1], lines[-1]))
        told = iter(() if self._logprobs is None else self._logprobs.read())
        sampled: list[Sampled] = []
        faults: list[SequenceFault] = []
        counts = False
        for row, state in enumerate(self.states):
            sequence, good = state.start.sequence, bool(finite[row] and possible[row])
            logprob = None if state.start.logprobs is None or self._logprobs is None else next(told)
            if state.supposed is not None:
                counts = counts and good and tokens[row - 1] == state.supposed
                if not counts:
                    continue
            counts = good
            if not finite[row]:
                faults.append(_not_finite(sequence, self._num_tokens[row]))
            elif not possible[row]:
                faults.append(
                    SequenceFault(
                        sequence=sequence, message="allowed_ids, banned_ids and min_new_tokens leave no token to sample"
                    )
                )
            else:
                sampled.append(Sampled(sequence=sequence, token_id=tokens[row], logprob=logprob))
        return sampled, faults


@dataclass(frozen=True, slots=True)
class LaunchedPrompt:
    """Logprobs of neighbouring prompt positions."""

    sequence: SequenceId
    first: int
    """The position of the first one's token."""
    logprobs: LaunchedLogprobs

    def read(self) -> PromptLogprobs | SequenceFault:
        """Wait for the device and tell them; a fault where any of them is not finite.

        With NaN or infinity among a position's logits it is not: NaN compares with nothing, so it would pass for the likeliest.
        """
        told = self.logprobs.read()
        for place, each in enumerate(told):
            if not math.isfinite(each.logprob):
                return _not_finite(self.sequence, self.first + place)
        return PromptLogprobs(sequence=self.sequence, first=self.first, logprobs=tuple(told))


def _not_finite(sequence: SequenceId, position: int) -> SequenceFault:
    message = f"the model's logits for position {position} are not finite; its weights or its data type are at fault"
    return SequenceFault(sequence=sequence, message=message, not_finite=True)
