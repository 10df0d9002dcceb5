"""Which tenants have fewer places in the running batch than is their due, and which sequences give way to theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from serve.engine.credit import Credit
from serve.engine.limits import EngineLimits
from serve.engine.prefix_cache import PrefixCache
from serve.engine.sequence import Sequence
from serve.engine.waiting_line import WaitingLine
from serve.types import SequenceId


@dataclass(frozen=True, slots=True)
class Claim:
    """A sequence that begins in the next step, before all others that wait."""

    sequence: Sequence
    giving_way: tuple[Sequence, ...]
    """Running sequences whose places, budget or blocks it needs."""


class Places:
    """Deals the running batch out among tenants: the places divided by the number of tenants that run or wait are the share of
    each, and its due, unless it has had more or fewer before (see ``Credit``). Whoever is alone may have them all.

    A waiting sequence of a tenant that has less than its due begins at once. Where it finds no room, the newest sequence of
    the tenant that has most beyond its due gives way; so does a prompt that is still being computed, is longer, and takes the
    whole budget of a step. Nobody gives way to smaller priority.

    Why this ends: after an exchange the one tenant has no more than its due and the other no less, so that it is not turned
    back before what is due changes: when tenants come or go, or a credit is used up. A sequence that gave way does so again
    only when it is twice as long; so it does ``log2`` of its length times at most, and what is computed anew of it for the sake
    of others is less than twice its length. Nor does anybody pass the first of the queue whose tenant itself has less than its
    due.
    """

    def __init__(self, limits: EngineLimits, waiting: WaitingLine, running: dict[SequenceId, Sequence]) -> None:
        """
        Args:
            waiting: for reading, as is ``running``, whose order is that of admission.
        """
        self._num_places = limits.num_places
        self._budget = limits.max_step_tokens
        self._waiting = waiting
        self._running = running
        self._num_running: dict[str, int] = {}
        self._credit = Credit()

    @property
    def taken(self) -> Mapping[str, int]:
        """How many places each tenant has that has any."""
        return self._num_running

    def take(self, tenant: str) -> None:
        """A sequence of the tenant begins to run."""
        self._num_running[tenant] = self._num_running.get(tenant, 0) + 1

    def give_back(self, tenant: str) -> None:
        """A sequence of the tenant runs no longer."""
        self._num_running[tenant] -= 1
        if not self._num_running[tenant]:
            del self._num_running[tenant]

    def note_step(self) -> None:
        """A step is planned: whoever has fewer places than its share while others wait has credit for it."""
        tenants = self._tenants()
        if len(self._waiting) and len(tenants) > 1:
            self._credit.note_step(self._num_running, tenants, self._share(len(tenants)))

    def claims(self, cache: PrefixCache, headroom: int) -> list[Claim]:
        """Who begins in the next step, one of each tenant at most.

        Args:
            headroom: blocks that stay free.
        """
        head = self._waiting.first()
        tenants = self._tenants()
        if head is None or len(tenants) == 1:
            return []
        having, dues = self._num_running, self._dues(tenants)
        short = [tenant for tenant in self._waiting.tenants if having.get(tenant, 0) < dues[tenant]]
        if head.tenant in short:
            short = [head.tenant]
        claims: list[Claim] = []
        if short:
            room = _Room(self._running, self._num_places, self._budget, cache, headroom, dues)
            for tenant in sorted(short, key=lambda tenant: having.get(tenant, 0) - dues[tenant]):
                seq = self._waiting.first_of(tenant)
                if seq is not None and seq.priority >= head.priority and (giving := room.make(seq)) is not None:
                    claims.append(Claim(seq, giving))
        return claims

    def overtaking(self, cache: PrefixCache, headroom: int) -> Claim | None:
        """Who may begin before a step under way has ended: the first of the tenant that is furthest from its due.

        It may pass the head of the queue, whose tenant has more.

        Args:
            headroom: blocks that stay free.
        """
        head, tenants = self._waiting.first(), self._tenants()
        if head is None or len(tenants) == 1:
            return None
        having, dues = self._num_running, self._dues(tenants)
        tenant = min(
            self._waiting.tenants, key=lambda tenant: (having.get(tenant, 0) - dues[tenant], tenant != head.tenant, tenant)
        )
        seq = self._waiting.first_of(tenant)
        if seq is None or seq.priority < head.priority or having.get(tenant, 0) >= dues[tenant]:
            return None
        room = _Room(self._running, self._num_places, self._budget, cache, headroom, dues)
        giving_way = room.make(seq)
        return None if giving_way is None else Claim(seq, giving_way)

    def tenants_with_more(self, tenant: str) -> set[str]:
        """Those that have more places than this one, or lend it some, and half of their share or more."""
        tenants, own = self._tenants(), self._num_running.get(tenant, 0)
        half, loans = self._share(len(tenants)) // 2, self._loans(tenants)
        borrows = loans.get(tenant, 0) > 0
        return {
            other
            for other, count in self._num_running.items()
            if count >= half and (count > own or (borrows and loans.get(other, 0) < 0))
        }

    def tenants_with_their_due(self) -> set[str]:
        """Those that have no fewer places than is their due."""
        dues = self._dues(self._tenants())
        return {tenant for tenant, count in self._num_running.items() if count >= dues[tenant]}

    def _tenants(self) -> Set[str]:
        return self._waiting.tenants | self._num_running.keys()

    def _dues(self, tenants: Set[str]) -> dict[str, int]:
        """How many places each tenant may claim, which together are no more than there are, unless tenants are."""
        share = self._share(len(tenants))
        dues = dict.fromkeys(tenants, share)
        for tenant, places in self._loans(tenants).items():
            dues[tenant] += places
        return dues

    def _loans(self, tenants: Set[str]) -> dict[str, int]:
        return self._credit.loans(self._num_running, self._waiting.tenants, tenants, self._share(len(tenants)))

    def _share(self, num_tenants: int) -> int:
        return max(1, self._num_places // num_tenants)

    def check(self) -> None:
        """Assert what must always hold. For tests."""
        counted = Counter(seq.tenant for seq in self._running.values())
        assert counted == self._num_running, "the places that tenants have are counted wrong"
        self._credit.check()


class _Room:
    """What one step has to deal out."""

    def __init__(
        self,
        running: dict[SequenceId, Sequence],
        places: int,
        budget: int,
        cache: PrefixCache,
        headroom: int,
        dues: Mapping[str, int],
    ) -> None:
        """``dues``: places that each tenant which runs or waits may claim."""
        self._running = [seq for seq in running.values() if seq.debt > 0]
        """Those that go on, in order of admission."""
        self._cache = cache
        self._places = places - len(self._running)
        self._budget = budget - sum(seq.debt for seq in self._running)
        self._blocks = cache.pool.num_free - headroom
        self._dues = dues
        self._share_of_blocks = dict.fromkeys(dues, cache.pool.num_blocks // len(dues))

    def make(self, seq: Sequence) -> tuple[Sequence, ...] | None:
        """Who must give way so that a sequence can begin, and reckon with it; ``None``: there is no room to be had."""
        before = list(self._running), self._places, self._budget, self._blocks
        giving: list[Sequence] = []
        needed = self._cache.blocks_for(len(seq.token_ids))
        while self._budget <= 0 or self._places <= 0 or self._blocks < needed:
            one = self._next(seq, needed)
            if one is None:
                self._running, self._places, self._budget, self._blocks = before
                return None
            giving.append(one)
            self._running.remove(one)
            self._places += 1
            self._budget += one.debt
            self._blocks += len(one.table)  # some may be shared: then nothing begins in this step
        self._places -= 1
        self._budget -= seq.debt
        self._blocks -= needed
        return tuple(giving)

    def _next(self, seq: Sequence, needed: int) -> Sequence | None:
        """Who gives way next."""
        if not self._running:
            return None
        newest = self._running[-1]
        if self._budget <= 0 and newest.debt > max(1, seq.debt):
            return newest if newest.tenant != seq.tenant and _may_give_way(newest, seq) else None
        if self._budget <= 0 or self._places <= 0:
            return self._of_the_largest(seq, lambda one: 1, self._dues)
        own = sum(len(one.table) for one in self._running if one.tenant == seq.tenant)
        if own + needed > self._share_of_blocks[seq.tenant]:
            return None
        return self._of_the_largest(seq, lambda one: len(one.table), self._share_of_blocks)

    def _of_the_largest(self, seq: Sequence, size: Callable[[Sequence], int], dues: Mapping[str, int]) -> Sequence | None:
        """The newest that may give way, of the tenant that has most of what is short beyond its due."""
        beyond: dict[str, int] = {}
        for one in self._running:
            beyond[one.tenant] = beyond.get(one.tenant, -dues[one.tenant]) + size(one)
        most = max(beyond, key=lambda tenant: beyond[tenant])
        if beyond[most] <= 0 or most == seq.tenant:
            return None
        return next((one for one in reversed(self._running) if one.tenant == most and _may_give_way(one, seq)), None)


def _may_give_way(one: Sequence, other: Sequence) -> bool:
    return one.num_computed >= one.gives_way_from and one.priority <= other.priority
