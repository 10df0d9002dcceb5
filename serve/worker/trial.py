"""What steps take of a device beside weights and blocks: tried before the blocks are counted, so that steps have room."""

from __future__ import annotations

import logging

from serve.config import ServerConfig
from serve.engine.plan import Span, Start, StepPlan
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker import gpus
from serve.worker.loader import RankModel
from serve.worker.parallel import Ranks
from serve.worker.runner import Runner

_SAMPLING = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1)
"""What takes most of the ways to sample."""

_log = logging.getLogger(__name__)


def bytes_of_steps(config: ServerConfig, model: RankModel, ranks: Ranks) -> int:
    """Capture what is to be captured and compute the largest step that can be; all ranks together. Nothing of it is kept.

    Args:
        model: with few blocks; what is in them is overwritten.
    """
    gpus.give_back(model.device)
    before = gpus.reserved_bytes(model.device)
    runner = Runner(model, ranks)
    if runner.graphs is not None:
        runner.graphs.capture()
    plan = largest_step(config, model)
    runner.execute(plan)
    runner.execute(StepPlan(step=1, dropped=tuple(start.sequence for start in plan.starts)))
    taken = gpus.reserved_bytes(model.device) - before
    if runner.graphs is not None:
        runner.graphs.forget()
    del runner
    gpus.give_back(model.device)
    _log.info("steps of up to %d tokens and captured ones take %.2f GiB", config.scheduler.max_step_tokens, taken / (1 << 30))
    return taken


def largest_step(config: ServerConfig, model: RankModel) -> StepPlan:
    """As many prompts as may run at once, with as many tokens as a step may have, all of them sampled from.

    Their blocks are the same, over and over: what is in them does not matter.
    """
    tokens = config.scheduler.max_step_tokens
    count = min(config.scheduler.max_num_seqs, tokens)
    block_tokens, most = model.facts.block_tokens, model.survey.max_model_len - 1
    starts, spans = [], []
    for number in range(count):
        own = min(most, tokens // count + (number < tokens % count))
        sequence = SequenceId(-2 - number)
        ids = tuple(place % model.facts.vocab_size for place in range(own))
        blocks = tuple(BlockId(block) for block in range(-(-own // block_tokens)))
        starts.append(Start(sequence=sequence, index=0, token_ids=ids, num_prompt_tokens=own, sampling=_SAMPLING))
        spans.append(Span(sequence=sequence, start=0, count=own, new_blocks=blocks, sample=True))
    return StepPlan(step=0, starts=tuple(starts), spans=tuple(spans))
