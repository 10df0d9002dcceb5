"""What steps take of a device beside weights and blocks: tried before the blocks are counted, so that steps have room."""

from __future__ import annotations

import logging

from serve.config import ServerConfig
from serve.engine.plan import DRAFTED, Span, Start, StepPlan
from serve.model.cuda.tiling import SHARE_POSITIONS
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker import gpus
from serve.worker.loader import RankModel
from serve.worker.parallel import Ranks
from serve.worker.runner import Runner

_SAMPLING = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1)
"""What takes most of the ways to sample."""

_log = logging.getLogger(__name__)


def bytes_of_steps(config: ServerConfig, model: RankModel, ranks: Ranks, draft: RankModel | None = None) -> int:
    """Capture what is to be captured and compute the largest steps that can be; all ranks together. Nothing of it is kept.

    Where there is a draft model, what it guesses for as many sequences as may run is computed, too.

    Args:
        model: with few blocks; what is in them is overwritten.
        draft: the draft model, on rank 0, with as many.
    """
    gpus.give_back(model.device)
    before = gpus.reserved_bytes(model.device)
    runner = Runner(model, ranks, draft)
    if runner.graphs is not None:
        runner.graphs.capture()
    plan = largest_step(config, model)
    runner.execute(plan)
    if config.model.draft_model:
        runner.execute(guessed_step(config, model, plan))
    runner.execute(StepPlan(step=2, dropped=tuple(start.sequence for start in plan.starts)))
    plan = split_step(config, model)
    runner.execute(plan)
    runner.execute(StepPlan(step=4, dropped=tuple(start.sequence for start in plan.starts)))
    taken = gpus.reserved_bytes(model.device) - before
    if runner.graphs is not None:
        runner.graphs.forget()
    del runner
    gpus.give_back(model.device)
    _log.info("steps of up to %d tokens and captured ones take %.2f GiB", config.scheduler.max_step_tokens, taken / (1 << 30))
    return taken


def largest_step(config: ServerConfig, model: RankModel) -> StepPlan:
    """The plan of the largest step: as many prompts as may run, as many tokens as a step may have, each prompt sampled from.

    Their blocks are the same, over and over: what is in them does not matter.
    """
    tokens = config.scheduler.max_step_tokens
    count = min(config.scheduler.max_num_seqs, tokens)
    block_tokens, most = model.facts.block_tokens, max(1, model.facts.max_model_len - 1 - _guesses(config))
    starts, spans = [], []
    for number in range(count):
        own = min(most, tokens // count + (number < tokens % count))
        sequence = SequenceId(-2 - number)
        ids = tuple(place % model.facts.vocab_size for place in range(own))
        blocks = tuple(BlockId(block) for block in range(-(-own // block_tokens)))
        starts.append(Start(sequence=sequence, index=0, token_ids=ids, num_prompt_tokens=own, sampling=_SAMPLING))
        spans.append(Span(sequence=sequence, start=0, count=own, new_blocks=blocks, sample=True))
    return StepPlan(step=0, starts=tuple(starts), spans=tuple(spans))


def split_step(config: ServerConfig, model: RankModel) -> StepPlan:
    """The plan of a step of one token of each sequence that may run, each so long that its positions are split.

    What decoding takes for the parts is the more, the more tokens there are, however long sequences are; prompts are not split.
    So as many tokens are guessed besides as a step may have of all sequences together, whoever guesses, and the fewest of each.
    Blocks are the same, over and over, as above.
    """
    budget, wanted = config.scheduler.max_step_tokens, config.scheduler.speculative_tokens
    count = min(config.scheduler.max_num_seqs, budget)
    guesses = _spread(min(wanted, budget - count), count)
    length = max(1, min(2 * SHARE_POSITIONS, model.facts.max_model_len - 1 - max(guesses)))
    ids = tuple(place % model.facts.vocab_size for place in range(length))
    starts, spans = [], []
    for number, own in enumerate(guesses):
        sequence = SequenceId(-2 - number)
        starts.append(
            Start(sequence=sequence, index=0, token_ids=ids, num_prompt_tokens=length, sampling=SamplingParams(temperature=0.0))
        )
        covered = -(-(length + own) // model.facts.block_tokens)
        spans.append(
            Span(
                sequence=sequence,
                start=length - 1,
                count=1 + own,
                new_blocks=tuple(BlockId(block % model.facts.num_blocks) for block in range(covered)),
                sample=True,
                proposed=(0,) * own,
            )
        )
    return StepPlan(step=3, starts=tuple(starts), spans=tuple(spans))


def guessed_step(config: ServerConfig, model: RankModel, largest: StepPlan) -> StepPlan:
    """The step after the largest one in which the draft model guesses for as many of its sequences as it may."""
    budget, wanted, block_tokens = config.scheduler.max_step_tokens, _guesses(config), model.facts.block_tokens
    count = max(1, min(len(largest.spans), budget - wanted))
    spans = []
    for before, own in zip(largest.spans, _spread(min(wanted, budget - count), count), strict=False):
        end = before.count + 1 + own
        blocks = tuple(BlockId(block) for block in range(len(before.new_blocks), -(-end // block_tokens)))
        spans.append(
            Span(
                sequence=before.sequence,
                start=before.count,
                count=1 + own,
                new_tokens=(0,),
                new_blocks=blocks,
                sample=True,
                proposed=(DRAFTED,) * own,
            )
        )
    return StepPlan(step=1, spans=tuple(spans))


def _spread(guesses: int, sequences: int) -> list[int]:
    """So many guesses of a step, which all its sequences share, as evenly as they can be."""
    return [guesses // sequences + (number < guesses % sequences) for number in range(sequences)]


def _guesses(config: ServerConfig) -> int:
    """How many tokens a draft model guesses in one step, of all sequences together; 0 without one."""
    return config.scheduler.speculative_tokens if config.model.draft_model else 0
