"""Steps of one token of each of few sequences on the CPU, recorded once for each number of sequences and replayed."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from serve.model.attention import StepLayout
from serve.model.cuda.graphs import CaptureError
from serve.model.recording import NO_SOCKET, Program, Recorder, StepMemory, Steps
from serve.worker.decode_inputs import DecodeInputs, DecodeStep
from serve.worker.loader import RankModel
from serve.worker.overtaking import Overtaken, Overtaking
from serve.worker.replayed_layers import ReplayedLayers

PATIENCE: Final = 24
"""Steps of so many rows that are computed with replayed layers before one is recorded: three steps that Python computes cost as
much time as a replay of the whole step saves, in place of its layers, in about so many."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step has computed, before anything is sampled."""

    hidden_TE: Tensor
    """Last hidden states; of a replay overwritten by the next one, of this number of rows or another."""
    logits_TV: Tensor | None
    """This rank's logits of every row in fp32, if they were asked for; overwritten so, too."""


@dataclass(slots=True)
class _Size:
    """What is known of the steps of so many rows, with or without logits."""

    waited: int = 0
    """How many were left to replayed layers so far."""
    computed: bool = False
    """Whether one was computed, by which all is there that is made on first use."""
    program: Program | None = None
    results: Computed | None = None
    proven: bool = False
    """Whether a replay gave what the same step gives without."""


class RecordedSteps:
    """Owns the recorded steps of one model.

    The first step of so many rows is computed as all others are, the second is recorded while it is computed, the third is
    replayed and computed beside that: from the fourth on it is replayed, if both gave the same bits. None of those three gives
    way to another plan. A model whose step cannot be recorded goes on as before, and the log says so once. What ranks exchange
    they exchange in the same order each way.

    Where layers are replayed for any number of rows, the first steps are left to these: numbers of sequences that come and go,
    while calls begin and end one by one, are not worth three slow steps each.
    """

    def __init__(
        self, model: RankModel, inputs: DecodeInputs, overtaking: Overtaking, layers: ReplayedLayers | None = None
    ) -> None:
        """``layers``: those of other steps, which are begun and forgotten with these."""
        assert model.kernels is not None, "kernels' calls are what is replayed"
        self._model = model
        self._overtaking = overtaking
        self._inputs = inputs
        self._steps = Steps(model.kernels)
        self._memory = StepMemory()
        self._sizes: dict[tuple[int, bool], _Size] = {}
        self._begun = False
        self._aside = False
        self._layers = layers
        self._patience = PATIENCE

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows whose steps are replayed, in one of the two ways at least."""
        return tuple(dict.fromkeys(rows for (rows, _), size in self._sizes.items() if size.proven))

    @property
    def aside(self) -> bool:
        """Whether steps are computed as usual meanwhile: who profiles them wants to see what a replay does at once."""
        return self._aside

    @aside.setter
    def aside(self, value: bool) -> None:
        self._aside = value
        if self._layers is not None:
            self._layers.aside = value

    def capture(self) -> None:
        """Record steps from now on."""
        self._begun = True
        if self._layers is not None:
            self._layers.begin()

    def forget(self) -> None:
        """Give up all that was recorded: before weights are exchanged, whose addresses it holds."""
        self._begun = False
        self._sizes.clear()
        if self._layers is not None:
            self._layers.forget()

    def replay(self, layout: StepLayout, *, with_logits: bool = True) -> Computed | None:
        """Compute the step whose inputs were filled; ``None`` where that is to be done as usual.

        Args:
            with_logits: whether the head is computed, too. Ranks that exchange anything say the same.

        Raises:
            Overtaken: nothing of it counts, and it may be computed again.
        """
        rows = len(layout.table_rows)
        step = self._inputs.steps.get(rows)
        if not self._begun or self.aside or step is None or step.layout is not layout:
            return None
        size = self._sizes.setdefault((rows, with_logits), _Size())
        if not size.computed and size.waited < self._patience and self._layers is not None and self._layers.serves(rows):
            size.waited += 1
            return None
        if not size.computed:
            size.computed = True
            return self._compute(step, with_logits)  # to its end: what one has left is not all there when the next is recorded
        if size.program is None:
            return self._record(size, step, with_logits)
        if not size.program.replay(self._overtaking.descriptor if size.proven else NO_SOCKET):
            raise Overtaken
        assert size.results is not None, "results belong to the program"
        return size.results if size.proven else self._prove(size, step, with_logits)

    def _record(self, size: _Size, step: DecodeStep, with_logits: bool) -> Computed | None:
        try:
            with Recorder(self._steps, self._memory) as recorder:
                results = self._compute(step, with_logits)
        except CaptureError as error:
            self._give_up(f"it cannot be recorded: {error}")
            return None
        size.program, size.results = recorder.program(), results
        _log.debug(
            "recorded a step of %d rows in %d parts; by torch: %s",
            len(step.layout.table_rows),
            size.program.parts,
            ", ".join(sorted(recorder.torch_operations)) or "nothing",
        )
        return results

    def _prove(self, size: _Size, step: DecodeStep, with_logits: bool) -> Computed:
        """Compare a replay with the same step, computed once more: keys and values are written where they were."""
        assert size.results is not None, "results belong to the program"
        expected = self._compute(step, with_logits)
        size.proven = _same(size.results.hidden_TE, expected.hidden_TE)
        if size.results.logits_TV is not None and expected.logits_TV is not None:
            size.proven = size.proven and _same(size.results.logits_TV, expected.logits_TV)
        if not size.proven:
            self._give_up("a replay gave other numbers")
        return expected

    def _give_up(self, why: str) -> None:
        _log.warning(
            "a %s's decoding step is computed by Python in every step, which is slower: %s", self._model.facts.family, why
        )
        self._begun = False
        self._sizes.clear()

    def _compute(self, step: DecodeStep, with_logits: bool) -> Computed:
        self._model.state.layout = step.layout
        with self._overtaking.undisturbed(), nullcontext() if self._layers is None else self._layers.left_out():
            hidden_1TE = self._model.body(
                input_ids=step.input_ids, position_ids=step.position_ids, use_cache=False, return_dict=True
            ).last_hidden_state
        return Computed(hidden_1TE[0], self._model.head(hidden_1TE)[0].float() if with_logits else None)


def _same(x: Tensor, y: Tensor) -> bool:
    return bool(torch.equal(x, y) or torch.equal(x.nan_to_num(), y.nan_to_num()))
