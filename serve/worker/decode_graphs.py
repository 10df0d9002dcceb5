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
from serve.model.cuda.graphs import CaptureError, CpuGraph, CudaGraph, Graph
from serve.worker.decode_inputs import DecodeInputs, DecodeStep
from serve.worker.loader import RankModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Captured:
    """One step that can be replayed."""

    graph: Graph
    hidden_TE: Tensor
    """Last hidden states, overwritten by each replay, of this size or another."""
    logits_TV: Tensor
    """This rank's logits of every row, in the model's type; overwritten so, too."""


class DecodeGraphs:
    """Owns the captured steps of one model. All ranks capture the same sizes in the same order, the largest first."""

    def __init__(self, model: RankModel, inputs: DecodeInputs) -> None:
        self._model = model
        self._inputs = inputs
        self._captured: dict[int, Captured] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes that were captured, in that order."""
        return tuple(self._captured)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture a step of each size, with rows of no sequence: nothing in the cache is changed.

        Raises:
            StartError: the model cannot be captured.
        """
        self.forget()
        began, make = time.monotonic(), _maker(self._model.device)
        for size in sorted(self._inputs.steps, reverse=True):
            step = self._inputs.steps[size]
            graph = make()
            try:
                # Once before, so that all that is made on first use is there: tiles, compiled kernels, communicators.
                self.compute(step)
                hidden_TE, logits_TV = graph.capture(lambda step=step: self.compute(step))  # type: ignore[misc]  # bound now
            except torch.OutOfMemoryError as error:
                raise StartError(
                    f"kernels.cuda_graph_max_batch: there is no memory left for a step of {size} rows beside weights and KV "
                    "blocks; a smaller --cuda-graph-max-batch, --kv-cache-gib or --memory-fraction, or --cuda-graphs off, fits"
                ) from error
            except CaptureError as error:
                raise StartError(
                    f"kernels.cuda_graphs: a step of {size} rows cannot be captured: {error}; --cuda-graphs off serves without"
                ) from error
            self._captured[size] = Captured(graph, hidden_TE, logits_TV)
        seconds = time.monotonic() - began
        _log.info("captured %d decoding steps, of up to %d rows, in %.1f s", len(self.sizes), self.sizes[0], seconds)

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

    def compute(self, step: DecodeStep) -> tuple[Tensor, Tensor]:
        """The same, not captured: last hidden states, and this rank's logits."""
        self._model.state.layout = step.layout
        hidden_1TE = self._model.body(
            input_ids=step.input_ids, position_ids=step.position_ids, use_cache=False, return_dict=True
        ).last_hidden_state
        return hidden_1TE[0], self._model.head(hidden_1TE)[0]


def _maker(device: torch.device) -> Callable[[], Graph]:
    if device.type != "cuda":
        return CpuGraph
    torch.cuda.synchronize(device)
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)
