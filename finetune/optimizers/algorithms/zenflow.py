"""ZenFlow: AdamW at two paces, for an optimizer on the host (Lan et al., 2025, arXiv 2505.12242)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch

from finetune.config import TuneConfig
from finetune.distributed import Peers
from finetune.optimizers.algorithms.adamw import adamw
from finetune.optimizers.base import ShardedOptimizer
from finetune.optimizers.fragments import Fragment, Fragments, Piece, pieces_of
from finetune.optimizers.kind import Groups, OptimizerKind, UpdateSizes, betas_of, rate_of
from finetune.optimizers.rows import ChosenRows, Room, adam_by_rows

CHOSEN: Final = "chosen"
UPDATES: Final = "updates"
"""What is kept whole of a matrix: whether a row is updated in every step, and how often it was updated."""
CHUNK_ELEMENTS: Final = 1 << 21
"""Updated at once in the background: so many that starting threads does not count."""
_CACHED_ELEMENTS: Final = 1 << 20
"""Chosen weights that are updated at once."""

# Shapes.  R rows and C columns of a matrix   r, c rows and columns of a piece of it   k rows of a piece that are chosen


@dataclass(frozen=True, slots=True)
class _Rest:
    """What the background needs to know of one piece of a matrix to update the rows that are not chosen."""

    piece: Piece
    chosen_k: torch.Tensor
    updates_r: torch.Tensor
    """Updates of each row so far, this one counted."""


class ZenFlow(ShardedOptimizer):
    """The rows of each matrix with the largest gradients are updated in every step, all others every few steps.

    A matrix chooses the ``share`` of its rows whose gradients, of all ranks, are longest (rows as they are stored: of a linear
    layer outputs, of an embedding tokens). A chosen row has AdamW's update in each step. Of all others the gradients of
    ``update_every`` steps are added up, and their mean makes one update of AdamW, which the background computes during the next
    ``update_every`` steps, in the last of which it lands. Rows are chosen in the first step; once more ``update_every`` steps
    later, since the first gradient may be none (adapters) or like no other; then after each ``select_every`` steps. The step
    before a choice waits for the background, so that nothing is under way. A row's moments are corrected for their start by the
    number of updates it has had. Biases and norms have AdamW. Steps are those that were not skipped.

    The paper chooses input channels and updates them on the GPU during the backward pass. Here gradients have been clipped and
    are known to be finite before anything changes, and what is chosen lies in one piece of memory. All state has an element for
    each weight, or a number for each row that is equal on all peers, so it can be saved after any step and belongs to no number
    of ranks. A matrix keeps, besides AdamW's moments, ``put_off`` (the sum of gradients since the last update) and ``pending``
    (what will be subtracted from the weights); and of each row ``chosen`` (1 or 0) and ``updates``.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        matrices: frozenset[str],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        share: float,
        update_every: int,
        select_every: int,
    ) -> None:
        """``select_every`` is a multiple of ``update_every``, which is at least 2; all groups have the same betas and eps."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps}, matrices=matrices)
        self._share, self._update_every, self._select_every = share, update_every, select_every
        self._pieces: dict[torch.Tensor, list[tuple[str, Piece]]] = {}
        self._chosen: dict[torch.Tensor, list[ChosenRows]] = {}
        self._room = Room()
        self._adding = ThreadPoolExecutor(1, "zenflow-gradients")
        self._updating = ThreadPoolExecutor(1, "zenflow-weights")
        self._added: list[Future[torch.Tensor]] = []
        self._updated: dict[torch.Tensor, Future[None]] = {}

    def place(self, layout: Mapping[torch.Tensor, Fragments], device: torch.device, peers: Peers) -> None:
        super().place(layout, device, peers)
        for flat, fragments in layout.items():
            if self._holds_matrices(fragments):
                self._pieces[flat] = [(fragment.name, piece) for fragment in fragments for piece in pieces_of(fragment)]
                for fragment in fragments:
                    for key in (CHOSEN, UPDATES):
                        self.whole[f"{key}.{fragment.name}"] = torch.zeros(fragment.shape[0], device=flat.device)

    # -- what a caller must know of the background

    def release_gradients(self) -> None:
        """Wait until the gradients of the last step may be overwritten."""
        while self._added:
            self._added.pop(0).result()

    def settle(self) -> None:
        """Wait for the background, and bring the state into the tensors where it is saved and set."""
        self.release_gradients()
        for flat in list(self._updated):
            self._updated.pop(flat).result()
        for flat in list(self._chosen):
            self._put_back(flat)

    def close(self) -> None:
        """End the background, once it has done what it was told; what went wrong there goes wrong here."""
        self.settle()
        self._adding.shutdown()
        self._updating.shutdown()

    # -- the steps

    def _update_matrices(
        self, group: Mapping[str, Any], flat: torch.Tensor, state: dict[str, Any], fragments: Fragments
    ) -> None:
        step = state["step"]
        if self._is_last(step - 1):
            self._choose(flat, fragments)
        if flat not in self._chosen:
            self._chosen[flat] = self._take_out(flat)
        gradient = flat.grad
        assert gradient is not None
        for fragment in fragments:
            self._of(UPDATES, fragment.name).add_(self._of(CHOSEN, fragment.name))
        for rows in self._chosen[flat]:
            rows.update(group, flat, gradient, self._room)
        in_interval = step % self._update_every
        if in_interval:
            put_off = state["put_off"]
            self._added.append(self._adding.submit(put_off.copy_ if in_interval == 1 else put_off.add_, gradient))
            return
        if not self._is_last(step - self._update_every):
            self._land(flat)
        self._start_rest(group, flat, gradient, fragments)
        if self._is_last(step):
            self._land(flat)
            state["pending"].zero_()
            self._put_back(flat)

    def _is_last(self, step: int) -> bool:
        """Whether this step is the last one with its chosen rows; nothing is under way after it."""
        return step == self._update_every or step % self._select_every == 0

    def _update_others(self, group: Mapping[str, Any], flat: torch.Tensor, state: dict[str, Any], fragments: Fragments) -> None:
        adamw(group, flat, state)

    # -- chosen rows

    def _choose(self, flat: torch.Tensor, fragments: Fragments) -> None:
        assert flat not in self._chosen, "what was chosen before has been put back"
        assert flat.grad is not None
        lengths = self._sum_over_peers(torch.cat([_squares_of_rows(fragment, flat.grad) for fragment in fragments]))
        by_fragment = torch.split(lengths, [fragment.shape[0] for fragment in fragments])
        for fragment, length_R in zip(fragments, by_fragment, strict=True):
            count = max(1, round(self._share * fragment.shape[0]))
            chosen_R = self._of(CHOSEN, fragment.name).zero_()
            # Among equal ones (tokens that were not there) the first, on however many ranks.
            chosen_R[length_R.sort(descending=True, stable=True).indices[:count]] = 1.0

    def _take_out(self, flat: torch.Tensor) -> list[ChosenRows]:
        """The chosen rows, those that are equally wide together as long as a processor's cache holds them."""
        together: list[list[tuple[Piece, torch.Tensor, torch.Tensor]]] = []
        left: dict[int, int] = {}
        last: dict[int, list[tuple[Piece, torch.Tensor, torch.Tensor]]] = {}
        for name, piece in self._pieces[flat]:
            rows, width = self._chosen_of(name, piece), piece.columns
            if len(rows) == 0:
                continue
            if left.get(width, 0) < len(rows):
                last[width], left[width] = [], max(len(rows), _CACHED_ELEMENTS // width)
                together.append(last[width])
            last[width].append((piece, rows, piece.of_rows(self._of(UPDATES, name))[rows]))
            left[width] -= len(rows)
        return [ChosenRows(pieces, flat, self.state[flat]) for pieces in together]

    def _chosen_of(self, name: str, piece: Piece) -> torch.Tensor:
        """Rows of a piece, (k,)."""
        return piece.of_rows(self._of(CHOSEN, name)).nonzero().squeeze(1)

    def _put_back(self, flat: torch.Tensor) -> None:
        """End the time of the chosen rows apart; the background must not be at work on this tensor."""
        for rows in self._chosen.pop(flat):
            rows.put_back(self.state[flat])

    # -- the rest

    def _start_rest(self, group: Mapping[str, Any], flat: torch.Tensor, gradient: torch.Tensor, fragments: Fragments) -> None:
        """Have the background prepare the update of all rows that are not chosen."""
        for fragment in fragments:
            self._of(UPDATES, fragment.name).add_(1.0 - self._of(CHOSEN, fragment.name))
        told = [
            _Rest(piece, self._chosen_of(name, piece), piece.of_rows(self._of(UPDATES, name)).clone())
            for name, piece in self._pieces[flat]
        ]
        state = self.state[flat]
        added = self._adding.submit(torch.add, state["put_off"], gradient, out=state["pending"])
        self._added.append(added)
        settings = {key: group[key] for key in ("lr", "weight_decay", "betas", "eps")}

        def update() -> None:
            added.result()
            with torch.no_grad():
                for rest in told:
                    _prepare_rest(settings, flat, state, rest, self._update_every)

        self._updated[flat] = self._updating.submit(update)

    def _land(self, flat: torch.Tensor) -> None:
        """Make the update that is pending."""
        under_way = self._updated.pop(flat, None)
        if under_way is not None:
            under_way.result()
        pending = self.state[flat]["pending"]
        for _, piece in self._pieces[flat]:  # what pads a flat tensor stays as it is
            piece.of(flat).sub_(piece.of(pending))

    def _of(self, key: str, name: str) -> torch.Tensor:
        return self.whole[f"{key}.{name}"]


def _squares_of_rows(fragment: Fragment, flat: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of each row of the whole matrix, (R,), as far as this rank holds it."""
    square_R = flat.new_zeros(fragment.shape[0])
    for piece in pieces_of(fragment):
        piece.of_rows(square_R).add_(torch.linalg.vector_norm(piece.of(flat), dim=1).square_())
    return square_R


def _prepare_rest(settings: Mapping[str, Any], flat: torch.Tensor, state: Mapping[str, Any], rest: _Rest, summed: int) -> None:
    """Turn the sum of so many gradients in ``pending`` into what is subtracted from the weights: nothing from chosen rows.

    Their moments are changed here like all others and are overwritten when the chosen ones are put back.
    """
    tensors = [rest.piece.of(tensor) for tensor in (flat, state["exp_avg"], state["exp_avg_sq"], state["pending"])]
    size = max(1, CHUNK_ELEMENTS // rest.piece.columns)
    scratch_rc = torch.empty(min(size, rest.piece.rows), rest.piece.columns)
    for start in range(0, rest.piece.rows, size):
        weight_rc, first_rc, second_rc, pending_rc = (tensor[start : start + size] for tensor in tensors)
        change_rc, updates_r = scratch_rc[: len(weight_rc)], rest.updates_r[start : start + size]
        adam_by_rows(settings, pending_rc, first_rc, second_rc, updates_r, change_rc, summed=summed)
        torch.add(change_rc, weight_rc, alpha=settings["lr"] * settings["weight_decay"], out=pending_rc)
    tensors[-1].index_fill_(0, rest.chosen_k, 0.0)


def make_zenflow(config: TuneConfig, groups: Groups, matrices: frozenset[str]) -> torch.optim.Optimizer:
    """Build a run's ZenFlow; of the configuration it takes ``lr``, ``betas`` and ``eps`` of AdamW, and ``offload.zenflow``."""
    paces = config.offload.zenflow
    return ZenFlow(
        groups,
        matrices=matrices,
        lr=rate_of(config),
        betas=betas_of(config),
        eps=config.optimizer.eps,
        share=paces.share,
        update_every=paces.update_every,
        select_every=paces.select_every,
    )


def _scratch(sizes: UpdateSizes) -> int:
    """Gradients and changes of a matrix's chosen rows, and what the background changes at once."""
    return round(8 * sizes.chosen * sizes.matrix_part) + 4 * min(CHUNK_ELEMENTS, sizes.matrix_part)


KIND = OptimizerKind(
    make=make_zenflow,
    state=("exp_avg", "exp_avg_sq"),
    matrix_state=("exp_avg", "exp_avg_sq", "put_off", "pending"),
    whole_state={CHOSEN: 0, UPDATES: 0},
    scratch=_scratch,
)
