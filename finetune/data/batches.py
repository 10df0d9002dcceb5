"""Samples as tensors: what one rank computes in one step, and in one evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from finetune.data.pack import SampleOrder, Share, TokenStream


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What one rank computes at once: B samples of L tokens."""

    inputs: torch.Tensor
    """int64 [B, L]"""
    targets: torch.Tensor
    """int64 [B, L], the input's successor; -100 does not count."""
    segments: torch.Tensor | None = None
    """int64 [B, L]: number of the packed sample each token belongs to, growing from 0 within a row. Tokens see their own
    segment alone and count positions from its start. ``None``: each row is one segment."""

    @property
    def num_targets(self) -> int:
        """Targets that count."""
        return int((self.targets != -100).sum())


def step_batches(stream: TokenStream, order: SampleOrder, share: Share, first: int) -> list[Microbatch]:
    """This rank's micro-batches of the step whose samples begin at position ``first`` of the run."""
    batches = []
    for position in share.positions(first):
        inputs, targets = stream.samples(order.at(position, share.micro))
        batches.append(Microbatch(torch.from_numpy(inputs), torch.from_numpy(targets)))
    return batches


def eval_batches(stream: TokenStream, share: Share, limit: int) -> list[Microbatch]:
    """This rank's part of the first ``limit`` samples (0: of all): as many batches on every rank, as ZeRO needs.

    What is missing for that is filled up with targets that do not count.
    """
    count = stream.num_samples if limit == 0 else min(limit, stream.num_samples)
    per_round = share.ranks * share.micro
    batches: list[Microbatch] = []
    for first in range(share.rank * share.micro, -(-count // per_round) * per_round, per_round):
        wanted = torch.arange(first, first + share.micro)
        inputs, targets = map(torch.from_numpy, stream.samples(wanted.clamp(max=count - 1).numpy()))
        # A copy, since inputs and targets are parts of the same memory.
        batches.append(Microbatch(inputs, targets.masked_fill((wanted >= count)[:, None], -100)))
    return batches
