"""Steps of one token of each sequence, captured once for each size and replayed: the host launches one thing, not hundreds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from serve.errors import StartError
from serve.model.attention import StepLayout
from serve.model.cuda.graphs import CaptureError, Graph, graphs_of, size_for
from serve.worker.decode_inputs import DecodeInputs, DecodeStep
from serve.worker.loader import RankModel
from serve.worker.parallel import Ranks
from serve.worker.sampling.backend import SamplingBackend, TorchSampling
from serve.worker.sampling.captured import CapturedSampling
from serve.worker.sampling.sampler import first_columns, likeliest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Captured:
    """One step that can be replayed. What is in its tensors is overwritten by each replay, of this size or another."""

    graph: Graph
    hidden_TE: Tensor
    """Last hidden states."""
    logits_TV: Tensor
    """This rank's logits of every row, in the model's type."""
    likeliest_2T: Tensor | None
    """The likeliest token of every row, and whether its logit is finite: int64, on the stage's rank 0."""
    gathering: Graph
    """Brings all ranks' logits to ``whole_TV``, for who wants more than the likeliest token; all ranks replay it."""
    whole_TV: Tensor | None
    """fp32, on the stage's rank 0."""
    sampling: SamplingBackend
    """Samples from the first rows of ``whole_TV``, there."""


class DecodeGraphs:
    """Owns the captured steps of one model. All ranks capture the same sizes in the same order, the largest first."""

    def __init__(self, model: RankModel, inputs: DecodeInputs, ranks: Ranks) -> None:
        self._model = model
        self._inputs = inputs
        self._ranks = ranks
        self._captured: dict[int, Captured] = {}
        self._begins_S = first_columns(model.head_widths, model.device)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes that were captured, in that order."""
        return tuple(self._captured)

    def holds(self, rows: int) -> bool:
        """Whether steps of so many rows are replayed."""
        return rows > 0 and size_for(tuple(self._inputs.steps), rows) in self._captured

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture a step of each size, with rows of no sequence: nothing in the cache is changed.

        Raises:
            StartError: the model cannot be captured.
        """
        self.forget()
        began, make = time.monotonic(), graphs_of(self._model.device)
        whole_TV = self.place_for_logits()
        for size in sorted(self._inputs.steps, reverse=True):
            try:
                self._captured[size] = self._capture(self._inputs.steps[size], make, whole_TV[:size])
            except torch.OutOfMemoryError as error:
                raise StartError(
                    f"kernels.cuda_graph_max_batch: there is no memory left for a step of {size} rows beside weights and KV "
                    "blocks; a smaller --cuda-graph-max-batch, --kv-cache-gib or --memory-fraction, or --cuda-graphs off, fits"
                ) from error
            except CaptureError as error:
                raise StartError(
                    f"kernels.cuda_graphs: a step of {size} rows cannot be captured: {error}; --cuda-graphs off serves without"
                ) from error
        seconds = time.monotonic() - began
        _log.info("captured %d decoding steps, of up to %d rows, in %.1f s", len(self.sizes), self.sizes[0], seconds)

    def _capture(self, step: DecodeStep, make: Callable[[], Graph], whole_TV: Tensor) -> Captured:
        """``whole_TV``: see ``gather``."""
        # Each once before, so that all that is made on first use is there: tiles, compiled kernels, communicators.
        self.compute(step)
        graph = make()
        hidden_TE, logits_TV, *at_first = graph.capture(lambda: self.compute(step))
        self.gather(logits_TV, whole_TV)
        gathering = make()
        gathering.capture(lambda: self.gather(logits_TV, whole_TV))
        found = None if self._ranks.rank else whole_TV
        return Captured(
            graph=graph,
            hidden_TE=hidden_TE,
            logits_TV=logits_TV,
            likeliest_2T=at_first[0] if at_first else None,
            gathering=gathering,
            whole_TV=found,
            sampling=self._model.sampling if found is None else self._capture_draws(found, make),
        )

    def _capture_draws(self, whole_TV: Tensor, make: Callable[[], Graph]) -> SamplingBackend:
        """What samples from these logits, as captured.

        One that cannot be is no reason to go on without: what a failed capture leaves of its pool lets no other one begin.
        """
        draws = CapturedSampling(whole_TV)
        draws.capture(make)
        return draws

    def forget(self) -> None:
        """Give up all that was captured: before weights are exchanged, whose addresses it holds."""
        self._captured.clear()

    def replay(self, layout: StepLayout) -> Captured | None:
        """Compute the step whose inputs were filled; ``None`` where it was not captured."""
        captured = self._captured.get(len(layout.table_rows))
        if captured is None or self._inputs.steps[len(layout.table_rows)].layout is not layout:
            return None
        captured.graph.replay()
        return captured

    def compute(self, step: DecodeStep) -> tuple[Tensor, ...]:
        """Compute a step by its modules, as it is captured.

        Returns:
            Last hidden states, this rank's logits, and on the stage's rank 0 ``likeliest_2T``.
        """
        self._model.state.layout = step.layout
        hidden_1TE = self._model.body(
            input_ids=step.input_ids, position_ids=step.position_ids, use_cache=False, return_dict=True
        ).last_hidden_state
        logits_TV = self._model.head(hidden_1TE)[0]
        peaks_T, places_T = TorchSampling().peaks(logits_TV)
        parts_TX = self._ranks.gather_columns(torch.stack((peaks_T.float(), places_T.float()), dim=1), (2,) * self._ranks.size)
        return hidden_1TE[0], logits_TV, *([] if parts_TX is None else [likeliest(parts_TX, self._begins_S)])

    def gather(self, logits_TV: Tensor, whole_TV: Tensor) -> tuple[()]:
        """Write all ranks' logits to one place, in fp32, on the stage's rank 0."""
        gathered_TV = self._ranks.gather_columns(logits_TV, self._model.head_widths)
        if gathered_TV is not None:
            whole_TV.copy_(gathered_TV)
        return ()

    def place_for_logits(self) -> Tensor:
        """Where steps of all sizes have their whole logits, one after the other; of no size on other ranks than the first."""
        columns = 0 if self._ranks.rank else sum(self._model.head_widths)
        return torch.empty(max(self._inputs.steps), columns, dtype=torch.float32, device=self._model.device)
