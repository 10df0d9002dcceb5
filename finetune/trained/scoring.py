"""Adds up a model's losses on what it is given, piece by piece: text as one stream in windows, samples each by itself.

N samples or windows of one batch   L their longest, or the window
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from finetune.data.targets import IGNORE_INDEX
from finetune.model.loss import token_losses

Ids = NDArray[np.int64]
_SORTED_BATCHES = 64
"""Batches of samples that are sorted by length before they are computed, so that less is padded."""


class Scorer:
    """The losses of one model on one CPU.

    Args:
        window: tokens that a token of text is seen after at most, and itself.
        batch: windows or samples computed at once.
    """

    def __init__(self, model: PreTrainedModel, *, window: int, batch: int) -> None:
        self._model, self._window, self._batch = model, window, batch
        self._stream: list[Ids] = []
        self._waiting = 0
        self._samples: list[tuple[Ids, Ids]] = []
        self.loss_sum = 0.0
        self.num_targets = 0
        self.stream_tokens = 0

    def add_text(self, ids: Ids) -> None:
        """The next tokens of the stream, in which every token but the first is a target."""
        self._stream.append(ids)
        self._waiting += len(ids)
        self.stream_tokens += len(ids)
        if self._waiting > self._batch * self._window:
            self._score_windows()

    def add_sample(self, ids: Ids, targets: Ids) -> None:
        """One sample, which sees itself alone: its ids but the last, and the target of each, or ``IGNORE_INDEX``."""
        self._samples.append((ids, targets))
        if len(self._samples) >= self._batch * _SORTED_BATCHES:
            self._score_samples()

    def finish(self) -> None:
        """Score what is still waiting."""
        self._score_windows()
        (rest,) = self._stream or [np.zeros(0, np.int64)]
        whole = max(0, len(rest) - 1) // self._window * self._window
        if whole > 0:
            self._score_rows(rest[: whole + 1])
        if len(rest) - whole > 1:
            self._score(rest[None, whole:-1], rest[None, whole + 1 :])
        self._stream, self._waiting = [], 0
        self._score_samples()

    def _score_windows(self) -> None:
        """All whole batches of windows; the last token of each window is the first of the next."""
        rest = np.concatenate(self._stream) if self._stream else np.zeros(0, np.int64)
        step = self._batch * self._window
        while len(rest) > step:
            self._score_rows(rest[: step + 1])
            rest = rest[step:]
        self._stream, self._waiting = [rest], len(rest)

    def _score_rows(self, ids: Ids) -> None:
        self._score(ids[:-1].reshape(-1, self._window), ids[1:].reshape(-1, self._window))

    def _score_samples(self) -> None:
        samples = sorted(self._samples, key=lambda sample: len(sample[0]))
        self._samples = []
        for first in range(0, len(samples), self._batch):
            some = samples[first : first + self._batch]
            shape = (len(some), len(some[-1][0]))
            inputs_NL, targets_NL = np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
            for row, (ids, targets) in enumerate(some):
                inputs_NL[row, : len(ids)] = ids  # padded at the end, which causal attention does not see
                targets_NL[row, : len(ids)] = targets
            self._score(inputs_NL, targets_NL)

    @torch.no_grad()
    def _score(self, inputs_NL: Ids, targets_NL: Ids) -> None:
        logits = self._model(input_ids=torch.from_numpy(inputs_NL), use_cache=False).logits
        self.loss_sum += float(token_losses(logits, torch.from_numpy(targets_NL)))
        self.num_targets += int((targets_NL != IGNORE_INDEX).sum())
