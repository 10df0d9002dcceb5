"""Carries out step plans on one rank: tensors in, forward, sampled tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from serve.engine.plan import PromptLogprobs, Sampled, SequenceFault, Span, StepPlan, StepResult
from serve.model.narrow_head import NarrowHead
from serve.model.sending import send
from serve.types import SequenceId
from serve.worker.batch import Batch, SequenceTable
from serve.worker.decode_graphs import Captured, DecodeGraphs
from serve.worker.decode_inputs import DecodeInputs
from serve.worker.drafting import Drafting
from serve.worker.loader import RankModel
from serve.worker.overtaking import Overtaken, Overtaking
from serve.worker.parallel import Ranks
from serve.worker.recorded_steps import Computed, RecordedSteps
from serve.worker.replayed_layers import replayed_layers
from serve.worker.rest import Rest
from serve.worker.sampling.sampler import (
    LaunchedPrompt,
    first_columns,
    likeliest,
    likeliest_answers,
    prompt_logprobs,
    sample,
    wants_likeliest,
)

_HEAD_ROWS = 64
"""Rows of prompt logits computed at once: bounds what a request for prompt logprobs can take."""


class Runner:
    """One rank's side of every step. All run the same plan; the first rank of the last stage samples and has the result."""

    def __init__(
        self, model: RankModel, ranks: Ranks, draft: RankModel | None = None, narrow: NarrowHead | None = None
    ) -> None:
        """
        Args:
            draft: the draft model, where there is one, on rank 0.
            narrow: of the model's head, where there is one.
        """
        self._model = model
        self.narrow: Final = narrow
        """What may find the likeliest tokens in place of the head."""
        self._ranks = ranks
        self.overtaking: Final = Overtaking()
        """What may be computed in the middle of a step."""
        model.state.look = self.overtaking.look
        facts, inputs = model.facts, None
        if model.graph_sizes:
            by_length = facts.length_rule is not None
            inputs = DecodeInputs(model.graph_sizes, facts.max_model_len, facts.block_tokens, model.device, by_length=by_length)
        self.graphs: DecodeGraphs | RecordedSteps | None = None
        """Captured decoding steps, where the model has some; without ``capture`` they are computed as all others are."""
        if inputs is not None:
            if model.kernels is None:
                self.graphs = DecodeGraphs(model, inputs, ranks)
            else:
                self.graphs = RecordedSteps(model, inputs, self.overtaking, replayed_layers(model, ranks, self.overtaking))
        self._begins_S = first_columns(model.head_widths, model.device)
        self._table = SequenceTable(facts.block_tokens, model.device, facts.length_rule, inputs)
        self._drafting = Drafting(draft, self._table, model, ranks)
        self.rest: Final = Rest()
        """When no step is computed."""

    @property
    def may_be_overtaken(self) -> bool:
        """Whether a step may be left in its middle: no other rank computes a part of it, and no device is ahead of the host."""
        return self._ranks.count == 1 and self._model.device.type == "cpu"

    @property
    def recorded(self) -> RecordedSteps | None:
        """The steps that are replayed on a CPU, where some are."""
        return self.graphs if isinstance(self.graphs, RecordedSteps) else None

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Compute one step; ``None`` on every rank but the one that answers."""
        with self.rest.interrupted(), torch.inference_mode():
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepResult | None:
        self._share_drawn(plan)
        self._table.learn(plan)
        if not plan.spans:
            return StepResult(step=plan.step) if self._ranks.answers else None
        spans = self._drafting.guess(plan.spans)
        batch, (hidden_TE, replayed) = self._compute_spans(spans)
        if self._ranks.stage.is_last:
            result = self._result(plan, batch, hidden_TE, replayed)
        else:
            self._ranks.hand_on(hidden_TE)
            result = None
        self._ranks.end_step()
        return result

    def _result(
        self, plan: StepPlan, batch: Batch, hidden_TE: Tensor, replayed: Captured | Computed | None
    ) -> StepResult | None:
        """What a step says, by the last hidden states; ``None`` on every rank of the last stage but the first.

        Args:
            replayed: what was computed besides, where the step was captured or recorded.
        """
        prompts = self._prompt_logprobs(hidden_TE, batch)
        sampled: list[Sampled] = []
        unsampled: list[SequenceFault] = []
        if batch.sample_rows:
            if isinstance(replayed, Captured):
                sampled, unsampled = self._sample_captured(replayed, batch)
            else:
                sampled, unsampled = self._sample_computed(hidden_TE, None if replayed is None else replayed.logits_TV, batch)
            self._table.keep_drawn((answer.sequence, answer.token_id) for answer in sampled)
        if not self._ranks.answers:
            return None
        told, faults = _read(prompts)
        faults.update((fault.sequence, fault) for fault in unsampled)
        return StepResult(
            step=plan.step,
            sampled=tuple(answer for answer in sampled if answer.sequence not in faults),
            prompt_logprobs=tuple(told),
            faults=tuple(faults.values()),
        )

    def _compute_spans(self, spans: tuple[Span, ...]) -> tuple[Batch, tuple[Tensor, Captured | Computed | None]]:
        """Their rows and what is computed of them, from the beginning after each plan that overtakes."""
        while True:
            batch = self._table.batch(spans)  # inputs of steps of one size have one place, where the other may have had its own
            try:
                return batch, self._compute(batch)
            except Overtaken:
                with self.overtaking.undisturbed():
                    self.overtaking.compute_other()

    def _compute(self, batch: Batch) -> tuple[Tensor, Captured | Computed | None]:
        """Last hidden states, at least of the rows that are read; and what was computed with them, captured or recorded."""
        replayed: Captured | Computed | None = None
        if self.recorded is not None:
            # A step that is proved is computed twice: by all ranks at once, though their copies are there at different times.
            with_logits = self._ranks.count == 1 and not self._searches(batch)
            replayed = self.recorded.replay(batch.layout, with_logits=with_logits)
        elif self.graphs is not None:
            replayed = self.graphs.replay(batch.layout)
        if replayed is not None:
            return replayed.hidden_TE, replayed
        self._model.state.layout, self._model.state.read = batch.layout, batch.read_rows
        try:
            hidden_1TE = self._model.body(
                input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, return_dict=True
            ).last_hidden_state
        finally:
            self._model.state.read = None
        return hidden_1TE[0], None

    def _searches(self, batch: Batch) -> bool:
        """Whether the likeliest tokens are all that is wanted, and are looked for without the logits of all."""
        return self.narrow is not None and self.narrow.serves(len(batch.sample_rows)) and wants_likeliest(batch.sampled)

    def _sample_computed(
        self, hidden_TE: Tensor, logits_TV: Tensor | None, batch: Batch
    ) -> tuple[list[Sampled], list[SequenceFault]]:
        """The next token of each row, on the stage's rank 0.

        Args:
            logits_TV: this rank's, where they were computed.
        """
        rows = batch.sample_rows
        if logits_TV is not None:
            return self._sample(_rows(logits_TV, rows), batch)
        hidden_RE = _rows(hidden_TE, rows)
        if self.narrow is not None and self._searches(batch) and (found := self.narrow.likeliest(hidden_RE)) is not None:
            return self._sample_likeliest(found.peaks_R, found.places_R, batch)
        return self._sample(self._model.head(hidden_RE[None])[0], batch)

    def _sample(self, own_RV: Tensor, batch: Batch) -> tuple[list[Sampled], list[SequenceFault]]:
        """The next token of each row, on the stage's rank 0.

        Of rows that want the likeliest one ranks exchange two numbers, not logits.

        Args:
            own_RV: this rank's logits.
        """
        own_RV, states = own_RV.float(), batch.sampled
        if self._ranks.size > 1 and wants_likeliest(states):
            return self._sample_likeliest(*self._model.sampling.peaks(own_RV.contiguous()), batch)
        logits_RV = self._ranks.gather_columns(own_RV, self._model.head_widths)
        return ([], []) if logits_RV is None else sample(logits_RV, states, self._model.sampling)

    def _sample_likeliest(self, peaks_R: Tensor, places_R: Tensor, batch: Batch) -> tuple[list[Sampled], list[SequenceFault]]:
        """The likeliest token of each row, on the stage's rank 0, of each rank's largest logit and its column there."""
        states, ranks = batch.sampled, self._ranks.size
        if ranks == 1:
            found_2R = torch.stack((places_R, peaks_R.isfinite()))
        else:
            parts_RX = self._ranks.gather_columns(torch.stack((peaks_R, places_R.float()), dim=1), (2,) * ranks)
            if parts_RX is None:
                return [], []
            found_2R = likeliest(parts_RX, self._begins_S)
        return likeliest_answers(found_2R, range(len(states)), states)

    def _sample_captured(self, captured: Captured, batch: Batch) -> tuple[list[Sampled], list[SequenceFault]]:
        """What ``_sample`` gives, of a captured step: it has found the likeliest tokens, and its draws are captured, too."""
        rows, states = batch.sample_rows, batch.sampled
        if wants_likeliest(states):
            return ([], []) if captured.likeliest_2T is None else likeliest_answers(captured.likeliest_2T, rows, states)
        if rows != tuple(range(len(rows))):  # between them is one of a prompt that ends later
            return self._sample(_rows(captured.logits_TV, rows), batch)
        captured.gathering.replay()
        return ([], []) if captured.whole_TV is None else sample(captured.whole_TV[: len(rows)], states, captured.sampling)

    def _share_drawn(self, plan: StepPlan) -> None:
        """Let every rank know the tokens that spans continue with, which the rank that answers drew."""
        continued = [span.sequence for span in plan.spans if span.continues] if self._ranks.count > 1 else []
        if continued:
            drawn = self._ranks.numbers_of_first(self._table.drawn(continued), self._model.device)
            self._table.keep_drawn(zip(continued, drawn, strict=True))

    def _logits(self, hidden_RE: Tensor) -> Tensor | None:
        """Logits of some rows, [R, V] in fp32, on the stage's rank 0."""
        return self._ranks.gather_columns(self._model.head(hidden_RE[None])[0].float(), self._model.head_widths)

    def _prompt_logprobs(self, hidden_TE: Tensor, batch: Batch) -> list[LaunchedPrompt]:
        """What the rank that answers will tell of prompt positions; nothing is read before the whole step is launched."""
        launched: list[LaunchedPrompt] = []
        for state, row, position, count in batch.prompt_rows:
            wanted = state.start.prompt_logprobs
            assert wanted is not None
            for offset in range(0, count, _HEAD_ROWS):
                rows = min(_HEAD_ROWS, count - offset)
                logits_RV = self._logits(hidden_TE[row + offset : row + offset + rows])
                first = position + offset + 1
                if logits_RV is not None:
                    targets = state.token_ids[first : first + rows]
                    launched.append(prompt_logprobs(logits_RV, state.start.sequence, first, targets, wanted))
        return launched


def _rows(tensor_TX: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows; a view where they are the first."""
    if rows == tuple(range(len(rows))):
        return tensor_TX[: len(rows)]
    return tensor_TX[send(torch.tensor(rows), tensor_TX.device)]


def _read(launched: Sequence[LaunchedPrompt]) -> tuple[list[PromptLogprobs], dict[SequenceId, SequenceFault]]:
    """What can be told of the step's prompt positions, and the sequences of which nothing can be."""
    results: list[PromptLogprobs] = []
    faults: dict[SequenceId, SequenceFault] = {}
    for part in launched:
        told = part.read()
        if isinstance(told, SequenceFault):
            faults.setdefault(told.sequence, told)
        else:
            results.append(told)
    return results, faults
