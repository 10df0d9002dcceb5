"""Carries out step plans on one rank: tensors in, forward, sampled tokens out."""

from __future__ import annotations

import torch
from torch import Tensor

from serve.engine.plan import PromptLogprobs, StepPlan, StepResult
from serve.worker.batch import Batch, SequenceTable
from serve.worker.loader import RankModel
from serve.worker.parallel import Ranks
from serve.worker.sampler import prompt_logprobs, sample

_HEAD_ROWS = 64
"""Rows of prompt logits computed at once: bounds what a request for prompt logprobs can take."""


class Runner:
    """One rank's side of every step. Every rank runs the same plan; rank 0 samples and has the result."""

    def __init__(self, model: RankModel, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        self._table = SequenceTable(model.facts.block_tokens, model.device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult | None:
        """Compute one step; ``None`` on every rank but 0."""
        batch = self._table.apply(plan)
        if batch is None:
            return StepResult(step=plan.step) if self._ranks.rank == 0 else None
        self._model.state.layout = batch.layout
        hidden_TE = self._model.body(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, return_dict=True
        ).last_hidden_state[0]
        prompts = self._prompt_logprobs(hidden_TE, batch)
        if not batch.sample_rows:
            return StepResult(step=plan.step, prompt_logprobs=tuple(prompts)) if self._ranks.rank == 0 else None
        logits_RV = self._logits(hidden_TE[list(batch.sample_rows)])
        if logits_RV is None:
            return None
        sampled, faults = sample(logits_RV, batch.sampled)
        return StepResult(step=plan.step, sampled=tuple(sampled), prompt_logprobs=tuple(prompts), faults=tuple(faults))

    def _logits(self, hidden_RE: Tensor) -> Tensor | None:
        """Logits of some rows, [R, V] in fp32, on rank 0."""
        return self._ranks.gather_columns(self._model.head(hidden_RE[None])[0].float(), self._model.head_widths)

    def _prompt_logprobs(self, hidden_TE: Tensor, batch: Batch) -> list[PromptLogprobs]:
        results = []
        for state, row, position, count in batch.prompt_rows:
            wanted = state.start.prompt_logprobs
            assert wanted is not None
            for offset in range(0, count, _HEAD_ROWS):
                rows = min(_HEAD_ROWS, count - offset)
                logits_RV = self._logits(hidden_TE[row + offset : row + offset + rows])
                first = position + offset + 1
                if logits_RV is not None:
                    results.append(
                        prompt_logprobs(logits_RV, state.start.sequence, first, state.token_ids[first : first + rows], wanted)
                    )
        return results
