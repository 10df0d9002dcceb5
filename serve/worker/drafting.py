"""Guesses by a smaller model, which rank 0 runs beside its part of the one that is served (Leviathan et al. 2023).

Its keys and values lie in a cache of its own under the same block ids, so a sequence's table serves both. What it has computed
of a sequence is known to nobody else: it begins at the first token whenever the ranks learn of the sequence, so that neither
the prefix cache nor an exchange of weights concerns it, and is computed no sooner than the sequence guesses.

A guess is drawn as the token itself will be, by the same rules and the same random number: where both models think alike, both
choose the same. What is said depends on no guess: it is what the served model draws.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from serve.config import ModelConfig, ServerConfig
from serve.engine.plan import DRAFTED, Span
from serve.errors import ConfigError
from serve.model.heads import Stage
from serve.model.sending import send
from serve.worker.batch import SequenceState, SequenceTable, Supposed
from serve.worker.loader import RankModel, Stopwatch, load_rank, opened, survey, with_blocks
from serve.worker.parallel import Ranks
from serve.worker.sampling.sampler import sample
from serve.worker.sizing import Blocks, bytes_per_block

_CHUNK_TOKENS = 512
"""Positions that are computed at once: bounds what the first guess of a long text takes."""


def draft_config(config: ServerConfig) -> ServerConfig:
    """The configuration of the draft model: whole on one rank, by the options that say how, not what, is computed."""
    model = config.model
    drafting = ModelConfig(
        path=model.draft_model,
        dtype=model.dtype,
        quantization=model.quantization,
        quantization_group=model.quantization_group,
        device=model.device,
        verify="auto" if model.verify == "sha256" else model.verify,
    )
    return dataclasses.replace(
        config,
        model=drafting,
        scheduler=dataclasses.replace(config.scheduler, speculative_tokens=0),
        kernels=dataclasses.replace(config.kernels, narrow_head=False),
    )


def draft_bytes_per_block(config: ServerConfig, rank: int, device: torch.device) -> int:
    """What the draft model's keys and values of one block take on this rank; 0 without one.

    Raises:
        ConfigError: the draft model is at fault.
    """
    if not config.model.draft_model or rank != 0:
        return 0
    drafting = draft_config(config)
    try:
        with opened(drafting, everything=False) as checkpoint:
            found = survey(checkpoint, drafting, device)
    except ConfigError as error:
        raise _told(error) from error
    if found.length_rule is not None:
        raise ConfigError(
            "model.draft_model: its angles depend on the length of a text; such a model is served, but guesses nothing"
        )
    return bytes_per_block(found, drafting, found.heads.shared_heads(0).width, Stage())


def load_draft(config: ServerConfig, served: RankModel, rank: int) -> RankModel | None:
    """The draft model; ``None`` without one, and on every rank but 0.

    Raises:
        ConfigError: it cannot be loaded, or has fewer positions than are served.
    """
    if not config.model.draft_model or rank != 0:
        return None
    try:
        model, _ = load_rank(
            draft_config(config), 0, served.device, lambda: Ranks(0, 1), Stopwatch(), num_blocks=served.facts.num_blocks
        )
    except ConfigError as error:
        raise _told(error) from error
    _require_positions(model, served)
    return model


def with_blocks_of(served: RankModel, draft: RankModel | None, config: ServerConfig) -> RankModel | None:
    """A draft model that was loaded when the served one had few blocks, with as many as that has now.

    Raises:
        ConfigError: it has fewer positions than are served.
    """
    if draft is None:
        return None
    _require_positions(draft, served)
    blocks = Blocks(count=served.facts.num_blocks, kv_heads=draft.survey.heads.shared_heads(0).width, memory="")
    return with_blocks(draft, draft_config(config), Ranks(0, 1), blocks)


def _require_positions(draft: RankModel, served: RankModel) -> None:
    needed, there = served.facts.max_model_len, draft.survey.max_model_len
    if there < needed:
        raise ConfigError(f"model.draft_model: it has {there} positions, and {needed} are served: --max-model-len {there}")


def _told(error: ConfigError) -> ConfigError:
    return ConfigError(f"model.draft_model: {error}")


class _Guess(Supposed):
    """A sequence as it will be if what was guessed comes; its row counts in any case."""

    @property
    def supposed(self) -> None:  # type: ignore[override]  # the protocol allows both
        return None


class Drafting:
    """Says what ``DRAFTED`` stands for in a step's spans: the same on every rank."""

    def __init__(self, model: RankModel | None, table: SequenceTable, served: RankModel, ranks: Ranks) -> None:
        """``model``: the draft model, on rank 0."""
        self._model = model
        self._table = table
        self._served = served
        self._ranks = ranks

    def guess(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """The spans of a plan that the table has learnt, with ids in the place of ``DRAFTED``."""
        wanted = [span for span in spans if DRAFTED in span.proposed[:1]]
        if not wanted:
            return spans
        guesses = [0] * sum(len(span.proposed) for span in wanted)
        if self._model is not None:
            guesses = [token for tokens in self._guesses(self._model, wanted) for token in tokens]
        if self._ranks.count > 1:
            guesses = self._ranks.numbers_of_first(guesses, self._served.device)
        left = iter(guesses)

        def filled(span: Span) -> Span:
            if DRAFTED not in span.proposed[:1]:
                return span
            return msgspec.structs.replace(span, proposed=tuple(next(left) for _ in span.proposed))

        return tuple(filled(span) for span in spans)

    def _guesses(self, model: RankModel, spans: Sequence[Span]) -> list[list[int]]:
        """The model's tokens for each span, as many as it proposes; 0 where logits are not finite or nothing is allowed."""
        states = [self._table.state(span.sequence) for span in spans]
        guesses: list[list[int]] = [[] for _ in spans]
        parts = self._catch_up(model, states)
        going = list(range(len(spans)))
        while going:
            logits_RV = self._logits(model, [parts[i] for i in going])
            rows = [_Guess(states[i], tuple(guesses[i])) if guesses[i] else states[i] for i in going]
            drawn, _ = sample(logits_RV, rows, model.sampling)
            token_of = {answer.sequence: answer.token_id for answer in drawn}
            for i in going:
                token = token_of.get(spans[i].sequence, 0)
                parts[i] = (states[i], states[i].num_tokens + len(guesses[i]), [token])
                guesses[i].append(token)
            going = [i for i in going if len(guesses[i]) < len(spans[i].proposed)]
        for state, tokens in zip(states, guesses, strict=True):
            state.drafted = (state.num_tokens, tuple(tokens[:-1]))
        return guesses

    def _catch_up(self, model: RankModel, states: Sequence[SequenceState]) -> list[tuple[SequenceState, int, list[int]]]:
        """Compute what was said since each last guessed, but for a last part, which is returned."""
        most = max(1, _CHUNK_TOKENS // len(states))
        parts = []
        for state in states:
            first = _num_computed(state)
            while (left := state.num_tokens - first) > most:
                count = min(_CHUNK_TOKENS, left - most)
                self._hidden(model, [(state, first, state.token_ids[first : first + count])])
                first += count
            parts.append((state, first, state.token_ids[first:]))
        return parts

    def _hidden(self, model: RankModel, parts: Sequence[tuple[SequenceState, int, list[int]]]) -> Tensor:
        """Last hidden states [T, hidden] of some parts."""
        staged_3T, model.state.layout = self._table.staged(parts)
        # It may have fewer rows than the model that is served: what it has no row for, it does not know.
        ids_1T = staged_3T[:1].clamp(max=model.facts.vocab_size - 1)
        hidden_1TE: Tensor = model.body(
            input_ids=ids_1T, position_ids=staged_3T[1:2], use_cache=False, return_dict=True
        ).last_hidden_state
        return hidden_1TE[0]

    def _logits(self, model: RankModel, parts: Sequence[tuple[SequenceState, int, list[int]]]) -> Tensor:
        """Logits [R, V] after the last token of each part, for the vocabulary of the model that is served."""
        hidden_TE = self._hidden(model, parts)
        layout = model.state.layout
        assert layout is not None
        hidden_RE = hidden_TE[send(torch.tensor(layout.query_starts[1:]) - 1, hidden_TE.device)]
        size = self._served.facts.vocab_size
        logits_RV = model.head(hidden_RE[None])[0].float()[:, :size]
        return torch.nn.functional.pad(logits_RV, (0, size - logits_RV.shape[1]), value=float("-inf"))


def _num_computed(state: SequenceState) -> int:
    """Positions that the draft model has computed of what is known by now; the last one is always to be computed."""
    count, supposed = state.drafted
    for token in supposed:
        if count >= state.num_tokens or state.token_ids[count] != token:
            break
        count += 1
    return min(count, state.num_tokens - 1)
