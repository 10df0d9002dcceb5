"""Rows as tensors: what one rank computes in one step, and in one evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from finetune.data.pack import SampleOrder, Share
from finetune.data.rows import Numbers, Rows
from finetune.data.targets import IGNORE_INDEX


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What one rank computes at once: B rows of L tokens."""

    inputs: torch.Tensor
    """int64 [B, L]"""
    targets: torch.Tensor
    """int64 [B, L], the input's successor; ``IGNORE_INDEX`` does not count."""
    segments: torch.Tensor | None = None
    """int64 [B, L]: number of the packed sample each token belongs to, growing from 0 within a row; padding is one more.
    Tokens see their own segment alone and count positions from its start. ``None``: each row is one segment."""

    @property
    def num_targets(self) -> int:
        """How many targets count towards the loss."""
        return int((self.targets != IGNORE_INDEX).sum())


def step_batches(rows: Rows, order: SampleOrder, share: Share, first: int) -> list[Microbatch]:
    """This rank's micro-batches of the step whose samples begin at position ``first`` of the run."""
    return [_microbatch(rows, order.at(position, share.micro)) for position in share.positions(first)]


def eval_batches(rows: Rows, share: Share, limit: int) -> list[Microbatch]:
    """This rank's part of the first ``limit`` rows (0: of all): as many batches on every rank, as ZeRO needs.

    What is missing for that is filled up with targets that do not count.
    """
    count = rows.num_samples if limit == 0 else min(limit, rows.num_samples)
    per_round = share.ranks * share.micro
    batches: list[Microbatch] = []
    for first in range(share.rank * share.micro, -(-count // per_round) * per_round, per_round):
        wanted = np.arange(first, first + share.micro)
        batch = _microbatch(rows, wanted.clip(max=count - 1))
        missing = torch.from_numpy(wanted >= count)[:, None]
        batches.append(Microbatch(batch.inputs, batch.targets.masked_fill(missing, IGNORE_INDEX), batch.segments))
    return batches


def _microbatch(rows: Rows, indices: Numbers) -> Microbatch:
    inputs, targets, segments = rows.rows(indices)
    return Microbatch(
        torch.from_numpy(inputs), torch.from_numpy(targets), None if segments is None else torch.from_numpy(segments)
    )
