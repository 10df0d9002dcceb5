"""Carries out step plans on one rank: tensors in, forward, sampled tokens out.

A step is launched, and settled when the device has computed it. Where a device replays captured steps, one of them may be
launched between the two: it begins with tokens that are there, and that the host has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from serve.engine.plan import Sampled, SequenceFault, Span, StepPlan, StepResult
from serve.model.narrow_head import NarrowHead
from serve.model.sending import send
from serve.worker.batch import UNKNOWN, Batch, SequenceState, SequenceTable
from serve.worker.decode_graphs import Captured, DecodeGraphs
from serve.worker.decode_inputs import DecodeInputs
from serve.worker.drafting import Drafting
from serve.worker.launched import LaunchedStep
from serve.worker.loader import RankModel
from serve.worker.overtaking import Overtaken, Overtaking
from serve.worker.parallel import Ranks
from serve.worker.recorded_steps import Computed, RecordedSteps
from serve.worker.replayed_layers import replayed_layers
from serve.worker.rest import Rest
from serve.worker.sampling.answers import LaunchedPrompt, LaunchedTokens
from serve.worker.sampling.sampler import (
    first_columns,
    launch_sampling,
    likeliest,
    prompt_logprobs,
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
        self.goes_ahead = ranks.stage.count == 1 and isinstance(self.graphs, DecodeGraphs)
        """Whether a step may be launched before the one before it is settled, where ``follows`` says so."""
        self._last: LaunchedStep | None = None
        """What was launched last and computes something."""
        self._has_guesses = False
        """Whether that has proposed tokens."""
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

    def follows(self, plan: StepPlan) -> bool:
        """Whether a plan may be launched before what was launched last is settled.

        It is a step that is replayed: others take the host long to launch, during which the tokens of the one before would be
        told to nobody, and the device begins with them while they are launched. And the host computes nothing by those tokens,
        as it does where sequences guess.
        """
        if not (self.goes_ahead and isinstance(self.graphs, DecodeGraphs)) or self._has_guesses or plan.swap is not None:
            return False
        return self.graphs.holds(len(plan.spans)) and all(span.count == 1 and not span.proposed for span in plan.spans)

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Compute one step while none is launched; ``None`` on every rank but the one that answers."""
        with self.rest.interrupted(), torch.inference_mode():
            return self._settle(self._launch(plan))

    def launch(self, plan: StepPlan, *, follows: bool = False) -> LaunchedStep:
        """Launch one step; a CUDA device computes it while the host goes on.

        Args:
            follows: whether the one before it may not be settled yet, as ``follows`` allows for this plan.
        """
        with self.rest.interrupted(), torch.inference_mode():
            return self._launch(plan, follows=follows)

    def settle(self, launched: LaunchedStep) -> StepResult | None:
        """Wait for a step, the oldest that was launched; ``None`` on every rank but the one that answers."""
        with self.rest.interrupted(), torch.inference_mode():
            return self._settle(launched)

    def _launch(self, plan: StepPlan, *, follows: bool = False) -> LaunchedStep:
        drawn_K: Tensor | None = None
        if self.goes_ahead:
            drawn_K = self._drawn(plan)
        else:
            self._share_drawn(plan)
        self._table.learn(plan)
        if not plan.spans:
            return LaunchedStep(plan.step)
        spans = self._drafting.guess(plan.spans)
        self._has_guesses = any(span.proposed for span in spans)
        batch, (hidden_TE, replayed) = self._compute_spans(spans, drawn_K)
        tokens: LaunchedTokens | None = None
        prompts: list[LaunchedPrompt] = []
        if self._ranks.stage.is_last:
            prompts = self._prompt_logprobs(hidden_TE, batch)
            tokens = self._tokens(batch, hidden_TE, replayed)
        else:
            self._ranks.hand_on(hidden_TE)
        was_late = None
        if follows:
            was_late = self._last is None or self._last.is_settled or self._last.is_done()
        on_device = self.goes_ahead and self._model.device.type == "cuda"
        self._last = LaunchedStep(plan.step, tokens, prompts, on_device=on_device, was_late=was_late)
        return self._last

    def _settle(self, launched: LaunchedStep) -> StepResult | None:
        launched.is_settled = True
        sampled: list[Sampled] = []
        unsampled: list[SequenceFault] = []
        if launched.tokens is not None:
            sampled, unsampled = launched.tokens.read()
            # Those of that time: a sequence may have been dropped since, and one have begun under its number.
            states = {each.start.sequence: each for each in launched.tokens.states if isinstance(each, SequenceState)}
            for answer in sampled:
                states[answer.sequence].keep(answer.token_id)
            for fault in unsampled:  # it may go on already, by any token
                states[fault.sequence].keep(0)
        else:
            launched.wait()
        self._ranks.end_step()
        if not self._ranks.answers:
            return None
        told, faults = launched.read_prompts()
        faults.update((fault.sequence, fault) for fault in unsampled)
        return StepResult(
            step=launched.step,
            sampled=tuple(answer for answer in sampled if answer.sequence not in faults),
            prompt_logprobs=tuple(told),
            faults=tuple(faults.values()),
            was_late=launched.was_late,
        )

    def _tokens(self, batch: Batch, hidden_TE: Tensor, replayed: Captured | Computed | None) -> LaunchedTokens | None:
        """What is sampled by the last hidden states; ``None`` where nothing is, and on ranks that do not answer.

        Args:
            replayed: what was computed besides, where the step was captured or recorded.
        """
        if not batch.sample_rows:
            return None
        if isinstance(replayed, Captured):
            tokens = self._sample_captured(replayed, batch)
        else:
            tokens = self._sample_computed(hidden_TE, None if replayed is None else replayed.logits_TV, batch)
        if self.goes_ahead:
            for state in batch.sampled:
                if isinstance(state, SequenceState):
                    state.drawn = UNKNOWN
        return tokens

    def _compute_spans(
        self, spans: tuple[Span, ...], drawn_K: Tensor | None
    ) -> tuple[Batch, tuple[Tensor, Captured | Computed | None]]:
        """Their rows and what is computed of them, from the beginning after each plan that overtakes.

        Args:
            drawn_K: see ``SequenceTable.batch``.
        """
        while True:
            # Inputs of steps of one size have one place, where the other may have had its own.
            batch = self._table.batch(spans, drawn_K)
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

    def _sample_computed(self, hidden_TE: Tensor, logits_TV: Tensor | None, batch: Batch) -> LaunchedTokens | None:
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

    def _sample(self, own_RV: Tensor, batch: Batch) -> LaunchedTokens | None:
        """The next token of each row, on the stage's rank 0.

        Of rows that want the likeliest one ranks exchange two numbers, not logits.

        Args:
            own_RV: this rank's logits.
        """
        own_RV, states = own_RV.float(), batch.sampled
        if self._ranks.size > 1 and wants_likeliest(states):
            return self._sample_likeliest(*self._model.sampling.peaks(own_RV.contiguous()), batch)
        logits_RV = self._ranks.gather_columns(own_RV, self._model.head_widths)
        if logits_RV is None:
            return None
        return launch_sampling(logits_RV, states, self._model.sampling, _last_tokens(batch))

    def _sample_likeliest(self, peaks_R: Tensor, places_R: Tensor, batch: Batch) -> LaunchedTokens | None:
        """The likeliest token of each row, on the stage's rank 0, of each rank's largest logit and its column there."""
        states, ranks = batch.sampled, self._ranks.size
        if ranks == 1:
            found_2R = torch.stack((places_R, peaks_R.isfinite()))
        else:
            parts_RX = self._ranks.gather_columns(torch.stack((peaks_R, places_R.float()), dim=1), (2,) * ranks)
            if parts_RX is None:
                return None
            found_2R = likeliest(parts_RX, self._begins_S)
        return LaunchedTokens(found_2R, states, range(len(states)))

    def _sample_captured(self, captured: Captured, batch: Batch) -> LaunchedTokens | None:
        """What ``_sample`` gives, of a captured step: it has found the likeliest tokens, and its draws are captured, too."""
        rows, states = batch.sample_rows, batch.sampled
        if wants_likeliest(states):
            if (found_2T := captured.likeliest_2T) is None:
                return None
            # The next replay writes over it; a device brings it to the host before that, by itself.
            return LaunchedTokens(found_2T if found_2T.is_cuda else found_2T.clone(), states, rows)
        if rows != tuple(range(len(rows))):  # between them is one of a prompt that ends later
            return self._sample(_rows(captured.logits_TV, rows), batch)
        captured.gathering.replay()
        if captured.whole_TV is None:
            return None
        return launch_sampling(captured.whole_TV[: len(rows)], states, captured.sampling, _last_tokens(batch))

    def _drawn(self, plan: StepPlan) -> Tensor | None:
        """What spans continue with, int64 [K] on the device; ``None`` where the host knows it.

        The rank that answers knows it once the step before is settled; the others never do. Neither waits for it.
        """
        continued = [self._table.state(span.sequence) for span in plan.spans if span.continues]
        last = self._last if self._last is not None and not self._last.is_settled else None
        if not continued or (last is None and self._ranks.count == 1):
            return None
        device = self._model.device
        if not self._ranks.answers:
            return self._ranks.tokens_of_first(torch.empty(len(continued), dtype=torch.int64, device=device))
        if last is None:
            return self._ranks.tokens_of_first(send(torch.tensor([state.drawn for state in continued]), device))
        assert last.tokens is not None, "what continues was sampled in the step before"
        return self._ranks.tokens_of_first(last.tokens.of(continued))

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


def _last_tokens(batch: Batch) -> Tensor | None:
    """The last token of what each sampled row is of, int64 on the device: what the row was computed of.

    ``None`` where the host knows them all.
    """
    if all(state.is_read for state in batch.sampled):
        return None
    return _rows(batch.input_ids[0], batch.sample_rows)


def _rows(tensor_TX: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows; a view where they are the first."""
    if rows == tuple(range(len(rows))):
        return tensor_TX[: len(rows)]
    return tensor_TX[send(torch.tensor(rows), tensor_TX.device)]
