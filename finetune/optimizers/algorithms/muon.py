"""Muon: each matrix moves along its momentum made orthogonal (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from finetune.config import TuneConfig
from finetune.distributed import Peers
from finetune.optimizers.algorithms.adamw import adamw
from finetune.optimizers.base import ShardedOptimizer
from finetune.optimizers.fragments import Fragment, Fragments
from finetune.optimizers.kind import Groups, OptimizerKind, UpdateSizes, betas_of, rate_of

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""Factors of x, x^3 and x^5 in one iteration on a singular value x."""
ITERATIONS: Final = 5
BUFFERS: Final = 6
"""Copies of one matrix, in fp32, that are held while it is made orthogonal."""
_SMALLEST_NORM: Final = 1e-7
_RMS: Final = 0.2

Turn = Sequence[Fragment | None]
"""Matrices that are made orthogonal at the same time, by the rank that does it; ``None`` where a rank has nothing to do."""

# Shapes.  M, N rows and columns of a matrix; m the smaller, n the larger of the two


class Muon(ShardedOptimizer):
    """Nesterov momentum and five Newton-Schulz iterations for matrices, AdamW with the same rate for all else.

    An update is scaled by 0.2 x sqrt(max(M, N)), after which its entries are about as large as AdamW's, so that learning rate
    and decoupled weight decay carry over (Liu et al., 2025, arXiv 2502.16982). A fused weight of queries, keys and values is
    one matrix.

    The momentum is spread as ZeRO spreads an optimizer's state. Only for the iterations a matrix is whole, on one rank:
    matrices are dealt out by the work they make, every rank gets one in turn, and its update goes back in pieces. So a rank
    holds about six matrices' worth of memory besides its share. A rank without peers (a stage of a pipeline without ZeRO) does
    all by itself; as with any data parallelism without ZeRO, ranks that do the same are alike as long as their machines are.

    DeepSpeed has a Muon too. It moves the momentum before the inner optimizer steps, which is where a step that is not finite
    is skipped here, and its state belongs to one number of ranks.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        matrices: frozenset[str],
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps}, matrices=matrices)
        self._turns: dict[torch.Tensor, list[Turn]] = {}
        self._counts: dict[str, list[int]] = {}

    def place(self, layout: Mapping[torch.Tensor, Fragments], device: torch.device, peers: Peers) -> None:
        super().place(layout, device, peers)
        ours = {flat: fragments for flat, fragments in layout.items() if self._holds_matrices(fragments)}
        matrices = [fragment for fragments in ours.values() for fragment in fragments]
        if not matrices:
            return
        mine = torch.tensor([fragment.count for fragment in matrices], device=device)
        by_matrix = torch.stack(peers.collect(mine), dim=1).tolist()
        self._counts = {fragment.name: counts for fragment, counts in zip(matrices, by_matrix, strict=True)}
        self._turns = {flat: turns_of(fragments, peers.size) for flat, fragments in ours.items()}

    def _update_matrices(
        self, group: Mapping[str, Any], flat: torch.Tensor, state: dict[str, Any], fragments: Fragments
    ) -> None:
        rate, decay, keep = group["lr"], group["weight_decay"], group["momentum"]
        gradient, momentum = flat.grad, state["momentum"]
        assert gradient is not None
        momentum.lerp_(gradient, 1.0 - keep)
        for turn in self._turns[flat]:
            held = [fragment for fragment in turn if fragment is not None]
            mine = torch.cat([fragment.of(gradient).lerp(fragment.of(momentum), keep).to(self._device) for fragment in held])
            self._make_orthogonal(turn, mine)
            for fragment, direction in zip(held, torch.split(mine, [fragment.count for fragment in held]), strict=True):
                scale = _RMS * math.sqrt(max(fragment.shape))
                fragment.of(flat).mul_(1.0 - rate * decay).sub_(direction.to(flat.device), alpha=rate * scale)

    def _make_orthogonal(self, turn: Turn, mine: torch.Tensor) -> None:
        """Change this rank's pieces of the turn's matrices, laid end to end; in between each matrix is whole on its rank."""
        own = turn[self._peers.rank]
        sent = [0 if fragment is None else fragment.count for fragment in turn]
        received = [0] * len(turn) if own is None else self._counts[own.name]
        whole = mine.new_empty(sum(received))
        self._peers.exchange(whole, mine, received, sent)
        if own is not None:
            whole = orthogonal(whole.view(own.shape)).flatten()
        self._peers.exchange(mine, whole, sent, received)

    def _update_others(self, group: Mapping[str, Any], flat: torch.Tensor, state: dict[str, Any], fragments: Fragments) -> None:
        adamw(group, flat, state)


def orthogonal(matrix_MN: torch.Tensor) -> torch.Tensor:
    """A matrix (M, N) with the singular vectors of the given one and singular values near 1, roughly 0.7 to 1.2; fp32.

    Computed in bf16 on a GPU and in fp32 on a CPU, which gains nothing from less. Reads its argument, writes a new tensor.
    """
    dtype = torch.bfloat16 if matrix_MN.is_cuda else torch.float32
    tall = matrix_MN.shape[0] > matrix_MN.shape[1]
    x_mn = matrix_MN.T if tall else matrix_MN
    x_mn = (x_mn / matrix_MN.norm().clamp_min(_SMALLEST_NORM)).to(dtype)
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram_mm = x_mn @ x_mn.T
        x_mn = torch.addmm(x_mn, torch.addmm(gram_mm, gram_mm, gram_mm, beta=cubic, alpha=quintic), x_mn, beta=linear)
    return (x_mn.T if tall else x_mn).float()


def turns_of(matrices: Fragments, ranks: int) -> list[Turn]:
    """Deal matrices out: the most work first, each to the rank that has the least so far. The same on every rank."""
    work = {matrix.name: math.prod(matrix.shape) * min(matrix.shape) for matrix in matrices}
    hands: list[list[Fragment]] = [[] for _ in range(ranks)]
    for matrix in sorted(matrices, key=lambda matrix: -work[matrix.name]):
        min(hands, key=lambda hand: sum(work[held.name] for held in hand)).append(matrix)
    longest = max(len(hand) for hand in hands)
    return [[hand[number] if number < len(hand) else None for hand in hands] for number in range(longest)]


def make_muon(config: TuneConfig, groups: Groups, matrices: frozenset[str]) -> torch.optim.Optimizer:
    """Build a run's Muon; of ``optimizer`` in the configuration it takes ``lr``, ``momentum``, ``betas`` and ``eps``."""
    options = config.optimizer
    lr, betas = rate_of(config), betas_of(config)
    return Muon(groups, matrices=matrices, lr=lr, momentum=options.momentum, betas=betas, eps=options.eps)


def _scratch(sizes: UpdateSizes) -> int:
    """Two numbers for each weight that AdamW updates at once."""
    return 8 * (sizes.others if sizes.flat else min(sizes.share, sizes.parameter))


KIND = OptimizerKind(
    make=make_muon,
    state=("exp_avg", "exp_avg_sq"),
    matrix_state=("momentum",),
    tables_are_matrices=False,
    scratch=_scratch,
    device_scratch=lambda sizes: 4 * BUFFERS * sizes.matrix,
    products=ITERATIONS * 6,  # three products of a multiplication and an addition each
)
