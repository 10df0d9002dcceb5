"""Whose rows a step leaves out, so that another tenant's first token comes sooner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from serve.engine.limits import EngineLimits
from serve.engine.places import Claim, Places
from serve.engine.prefix_cache import PrefixCache
from serve.engine.sequence import Sequence
from serve.types import SequenceId

ONE_STEP_IN: Final = 4
"""One step in so many leaves rows out at most: nobody loses more than this part of its speed for the sake of others."""


class FirstTokens:
    """For machines on which a step takes the longer the more rows it has: there, a prompt that is computed beside the rows of
    a flood waits for those too.

    The step in which a tenant begins that has less than its share leaves out the rows of those that have theirs; they are in
    the next one again. That is done where the whole prompt is computed in this step, so that its first token comes of it, and
    no other is computed in it.
    """

    def __init__(self, places: Places, limits: EngineLimits) -> None:
        self._places = places
        self._limits = limits
        self._latest = -ONE_STEP_IN

    def leave_out(
        self, claim: Claim, running: Mapping[SequenceId, Sequence], cache: PrefixCache, *, step: int, headroom: int
    ) -> frozenset[SequenceId]:
        """Running sequences that wait for the next step; none, unless the claim's is certain to begin in this one.

        Args:
            claim: the only one; what gave way for it runs no longer.
            step: number of the step.
            headroom: blocks that stay free when something begins.
        """
        first = claim.sequence
        rows = [seq for seq in running.values() if seq.debt > 0]
        missing = sum(max(0, cache.blocks_for(seq.num_computed + 1) - len(seq.table)) for seq in rows)
        if (
            0 <= step - self._latest < ONE_STEP_IN
            or self._limits.speculative_tokens  # what is guessed may take the blocks that are counted on here
            or any(seq.debt > 1 for seq in rows)
            or first.debt + len(rows) > self._limits.max_step_tokens
            or cache.pool.num_free < headroom + cache.blocks_for(len(first.token_ids)) + missing
        ):
            return frozenset()
        leave = self._places.tenants_with_their_share() - {first.tenant}
        left_out = frozenset(seq.id for seq in rows if seq.tenant in leave and seq.priority <= first.priority)
        if left_out:
            self._latest = step
        return left_out
