"""Whether a step can be planned without the tokens of the one under way."""

from __future__ import annotations

from collections.abc import Mapping

from serve.engine.limits import EngineLimits
from serve.engine.prefix_cache import PrefixCache
from serve.engine.sequence import Sequence
from serve.types import SequenceId


def can_run_ahead(running: Mapping[SequenceId, Sequence], cache: PrefixCache, limits: EngineLimits) -> bool:
    """Whether nobody guesses what comes after those tokens, and all running sequences find their blocks without taking them
    from one of these."""
    if limits.speculative_tokens and any(
        seq.speculation is not None and not seq.speculation.rests(seq.num_known_ahead) for seq in running.values()
    ):
        return False
    num_free, budget = cache.pool.num_free, limits.max_step_tokens
    if num_free >= len(running) + cache.blocks_for(budget):
        return True
    missing = 0
    for seq in running.values():
        count = min(seq.debt, budget)
        missing += max(0, cache.blocks_for(seq.num_computed + count) - len(seq.table))
        budget -= count
    return missing <= num_free
