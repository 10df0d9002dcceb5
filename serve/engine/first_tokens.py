"""Whose rows a step leaves out, so that another tenant's first token comes sooner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from serve.engine.limits import EngineLimits
from serve.engine.places import Claim, Places
from serve.engine.plan import StepPlan
from serve.engine.prefix_cache import PrefixCache
from serve.engine.sequence import Sequence
from serve.types import SequenceId

ONE_STEP_IN: Final = 4
"""One step in so many leaves rows out or is overtaken, in the mean: nobody loses more of its speed for the sake of others."""
MOST_AT_ONCE: Final = 4
"""So many may do so one after the other, when none has for a while: calls come at random moments, several at a time."""


class FirstTokens:
    """For machines on which a step takes the longer the more rows it has: there, a prompt that is computed beside the rows of
    a flood waits for those too.

    The step in which a tenant begins that has less than its due leaves out the rows of those that have theirs; they are in
    the next one again. Such a prompt may even overtake the step under way, where that is of tenants that have more than its
    own: it is given up in the middle, and computed anew behind it. That is done where the whole prompt is computed in one step,
    so that its first token comes of it, and no other is computed in it.
    """

    def __init__(self, places: Places, limits: EngineLimits, *, rows_take_time: bool) -> None:
        """``rows_take_time``: whether this is such a machine."""
        self._rows_take_time = rows_take_time
        self._places = places
        self._limits = limits
        self._paid = 0
        """Number of the step from which on nothing is owed for those that left rows out: ``ONE_STEP_IN`` for each."""
        self._crowded: tuple[Sequence, ...] = ()
        """Who gives way to the prompts that have overtaken a step, if their places do not get free by that."""

    def leave_out(
        self, claim: Claim, running: Mapping[SequenceId, Sequence], cache: PrefixCache, *, step: int, headroom: int
    ) -> frozenset[SequenceId]:
        """Running sequences that wait for the next step; none, unless the claim's is certain to begin in this one.

        Args:
            claim: the only one; what gave way for it runs no longer.
            step: number of the step.
            headroom: blocks that stay free when something begins.
        """
        if not self._may_be_alone(step):
            return frozenset()
        leave, first = self._places.tenants_with_their_due() - {claim.sequence.tenant}, claim.sequence
        rows = self._rows_beside(claim, running, cache, headroom=headroom)
        left_out = frozenset(seq.id for seq in rows if seq.tenant in leave and seq.priority <= first.priority)
        if left_out:
            self._spend(step)
        return left_out

    def overtaking(
        self, under: StepPlan, running: Mapping[SequenceId, Sequence], cache: PrefixCache, *, step: int, headroom: int
    ) -> Claim | None:
        """Whose prompt may be computed before a step that is under way; ``overtakes`` says that it is.

        All of that step are sequences that run yet, of tenants that have more places, and perhaps of its own. None has ended or
        given its blocks back meanwhile: what has, is still written into blocks that others may get.

        Args:
            step: number of the step that would overtake it.
            headroom: blocks that stay free when something begins.
        """
        if not self._may_be_alone(step):  # before anything is looked up: others ask in vain as often as they like
            return None
        claim = self._places.overtaking(cache, headroom)
        if claim is None or len(claim.giving_way) > MOST_AT_ONCE:
            return None
        first, more = claim.sequence, self._places.tenants_with_more(claim.sequence.tenant)
        tenants = set[str]()
        for row in (running.get(span.sequence) for span in under.spans):
            if row is None or row.priority > first.priority:
                return None
            tenants.add(row.tenant)
        if not tenants & more or tenants - more - {first.tenant}:
            return None
        return claim if self._rows_beside(claim, running, cache, headroom=headroom) else None

    def overtakes(self, claim: Claim, *, step: int) -> None:
        """It does, in the step of this number; whoever gives way to it does so afterwards."""
        self._spend(step)
        self._crowded = claim.giving_way

    def crowded(self, running: Mapping[SequenceId, Sequence]) -> list[Sequence]:
        """Who gives way now, since what overtook a step has places that did not get free."""
        over = sum(seq.debt > 0 for seq in running.values()) - self._limits.num_places if self._crowded else 0
        return [seq for seq in self._crowded if running.get(seq.id) is seq][: max(0, over)]

    def settle(self) -> None:
        """Nobody has to give way any more."""
        self._crowded = ()

    def _may_be_alone(self, step: int) -> bool:
        """Whether a prompt may at all be computed without the rows of others."""
        # What is guessed may take the blocks that are counted on here.
        asks_too_much = self._owed(step) >= ONE_STEP_IN * (MOST_AT_ONCE - 1)
        return self._rows_take_time and not asks_too_much and not self._limits.speculative_tokens

    def _owed(self, step: int) -> int:
        """Steps that must pass until nothing is owed; none if their numbers have begun anew, as they do with new ranks."""
        owed = self._paid - step
        return owed if 0 < owed <= ONE_STEP_IN * MOST_AT_ONCE else 0

    def _spend(self, step: int) -> None:
        self._paid = step + self._owed(step) + ONE_STEP_IN

    def _rows_beside(
        self, claim: Claim, running: Mapping[SequenceId, Sequence], cache: PrefixCache, *, headroom: int
    ) -> list[Sequence]:
        """The running sequences that would have a row in the next step; none where the claim's may not be alone in it."""
        first = claim.sequence
        rows = [seq for seq in running.values() if seq.debt > 0]
        missing = sum(max(0, cache.blocks_for(seq.num_computed + 1) - len(seq.table)) for seq in rows)
        if (
            any(seq.debt > 1 for seq in rows)
            or first.debt + len(rows) > self._limits.max_step_tokens
            or cache.pool.num_free < headroom + cache.blocks_for(len(first.token_ids)) + missing
        ):
            return []
        return rows
