"""Penalties and draws that are captured once for each size of a step and replayed, of logits that are always in the same place.

Shapes.  T rows of a size   R of them that are sampled   V vocabulary   L different tokens that a row may have seen
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from serve.model.cuda.graphs import Graph
from serve.types import SamplingParams
from serve.worker.sampling.backend import Choice, Manner, TorchSampling, draw, draw_numbers, manner_of, penalise, penalised
from serve.worker.sampling.seen import Seen

_FILLER: Final = SamplingParams()
MOST_SEEN: Final = 1024
"""L. Where a row has seen more, the step's penalties are applied as ever, operation by operation."""


class CapturedSampling(TorchSampling):
    """``SamplingBackend`` for the first rows of one size's logits: the same tokens, penalties and draws by a launch each."""

    def __init__(self, logits_TV: Tensor) -> None:
        """
        Args:
            logits_TV: fp32, where the logits of every step of this size are.
        """
        self.logits_TV = logits_TV
        size, device = logits_TV.shape[0], logits_TV.device
        self._numbers_6T = torch.zeros(6, size, dtype=torch.float64, device=device)
        self._penalties_3T = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64).repeat(1, size).to(device)
        """Repetition, presence, frequency."""
        self._seen_2TL = torch.zeros(2, size, MOST_SEEN, dtype=torch.int32, device=device)
        """Ids, and how often each was generated."""
        self._unread_T = torch.full((size,), -1, dtype=torch.int64, device=device)
        """A token that each row has generated besides, -1 where there is none."""
        self._draws: dict[Manner, tuple[Graph, Choice]] = {}
        self._penalising: tuple[Graph, Choice] | None = None

    def capture(self, make: Callable[[], Graph]) -> None:
        """Capture penalties, and a draw of each manner, the one that takes most memory first.

        Penalties come before draws, as they do in a step: what they give is still to be read when a draw is replayed, which
        may overwrite what was captured after it.

        Raises:
            CaptureError: one does what a graph cannot hold.
            torch.OutOfMemoryError: there is no room for it.
        """

        def captured(step: Callable[[], Choice]) -> tuple[Graph, Choice]:
            step()  # once before, for what is made on first use
            graph = make()
            return graph, Choice(*graph.capture(step))

        self._penalising = captured(self.penalise)
        for manner in reversed(Manner):
            self._draws[manner] = captured(partial(self.draw, manner))

    def draw(self, manner: Manner) -> Choice:
        """What is captured: of every row the token, drawn where the temperature is not 0, else the likeliest."""
        peaks_T, tokens_T = self.peaks(self.logits_TV)
        drawn_T = draw(self.logits_TV, self._numbers_6T, manner)
        return Choice(peaks_T, peaks_T, torch.where(self._numbers_6T[0] > 0, drawn_T, tokens_T))

    def penalise(self) -> Choice:
        """What is captured: the logits of what rows have seen are changed in place; peaks before, and the likeliest after."""
        raw_peaks_T, _ = self.peaks(self.logits_TV)
        rules_3T1 = self._penalties_3T.float()[:, :, None]
        id_TL, times_TL = self._seen_2TL[0].long(), self._seen_2TL[1].float()
        unread_T1 = self._unread_T[:, None]
        last_T1, is_known_TL = unread_T1.clamp(min=0), id_TL == unread_T1
        before_T1 = (times_TL * is_known_TL).amax(dim=1, keepdim=True)
        own_T1 = penalised(self.logits_TV.gather(1, last_T1), rules_3T1, before_T1 + 1.0)
        # An id that fills a row up is one that it has: written again, it is the same number.
        self.logits_TV.scatter_(1, id_TL, penalised(self.logits_TV.gather(1, id_TL), rules_3T1, times_TL))
        self.logits_TV.scatter_(1, last_T1, torch.where(unread_T1 < 0, self.logits_TV.gather(1, last_T1), own_T1))
        return Choice(raw_peaks_T, *self.peaks(self.logits_TV))

    def choose(
        self,
        logits_RV: Tensor,
        params: Sequence[SamplingParams],
        uniform: Sequence[float],
        seen: Sequence[Seen | None],
        unread_R: Tensor | None = None,
    ) -> Choice:
        """A token for each row: the likeliest at temperature 0, else one that is drawn at the row's ``uniform``.

        ``logits_RV`` must be the first rows of ``logits_TV``. Penalties change them in place first; penalties and draws are a
        launch each.
        """
        assert logits_RV.data_ptr() == self.logits_TV.data_ptr(), "draws are captured of logits in one place"
        changed = self._penalised(logits_RV, params, seen, unread_R) if any(seen) else None
        drawn = [manner_of(p) for p in params if p.temperature > 0]
        if not drawn:
            return super().choose(logits_RV, params, uniform, seen) if changed is None else changed
        size, vocabulary = self.logits_TV.shape
        rest = size - len(params)
        self._send(self._numbers_6T, draw_numbers([*params, *[_FILLER] * rest], [*uniform, *[0.0] * rest], vocabulary))
        found = _replayed(self._draws[max(drawn)], len(params))
        return found if changed is None else Choice(changed.raw_peaks_R, found.peaks_R, found.tokens_R)

    def _penalised(
        self, logits_RV: Tensor, params: Sequence[SamplingParams], seen: Sequence[Seen | None], unread_R: Tensor | None
    ) -> Choice:
        """Apply the penalties of some rows; what ``choose`` gives where nothing is drawn."""
        if max(len(each.ids) for each in seen if each is not None) > MOST_SEEN:
            raw_peaks_R, _ = self.peaks(logits_RV)
            penalise(logits_RV, params, seen, unread_R)
            return Choice(raw_peaks_R, *self.peaks(logits_RV))
        size = len(self.logits_TV)
        penalties = np.zeros((3, size))
        penalties[0] = 1.0
        seen_2TL = np.zeros((2, size, MOST_SEEN), dtype=np.int32)
        for row, (p, each) in enumerate(zip(params, seen, strict=True)):
            if each is not None and each.ids:
                penalties[:, row] = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
                for place, values in enumerate((each.ids, each.times)):
                    seen_2TL[place, row] = values[0]
                    seen_2TL[place, row, : len(values)] = values
        self._send(self._penalties_3T, torch.from_numpy(penalties))
        self._send(self._seen_2TL, torch.from_numpy(seen_2TL))
        self._unread_T.fill_(-1)
        if unread_R is not None:
            self._unread_T[: len(params)].copy_(unread_R)
        assert self._penalising is not None, "penalties were captured"
        return _replayed(self._penalising, len(params))

    @staticmethod
    def _send(place: Tensor, values: Tensor) -> None:
        # Pinned memory is not used again before the copy is done, which the host does not wait for.
        place.copy_(values.pin_memory() if place.is_cuda else values, non_blocking=True)


def _replayed(captured: tuple[Graph, Choice], rows: int) -> Choice:
    graph, choice = captured
    graph.replay()
    return Choice(*(part[:rows] for part in choice))
