"""Which tenants may have more of the places than an equal share for a while, having had fewer before."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final

MOST: Final = 128
"""What a tenant can save up, and owe: its share of the places for so many steps."""
LEAST: Final = 8
"""It may borrow from so many on, until nothing is left: so nobody gives a place back that it has just been given."""
_MOST_REMEMBERED: Final = 1024
"""Tenants that neither run nor wait whose accounts are kept."""


class Credit:
    """An account for each tenant, of places by steps: each step in which somebody waits adds a tenant's share of the places,
    and takes the places that it has.

    Calls come at random moments. A tenant that keeps to its share in the mean has more calls than its share of the places at
    times, and another that floods has as many as it can get at all times. What the one left to the others it gets back when it
    has use for it: with credit it may have more than its share, and those in debt lend what it wants in equal parts, half of
    their share at most. The account of a tenant that neither runs nor waits rests.
    """

    def __init__(self) -> None:
        self._balances: dict[str, int] = {}
        self._in_credit: set[str] = set()

    def note_step(self, having: Mapping[str, int], tenants: Set[str], share: int) -> None:
        """A step is planned in which somebody waits.

        Args:
            having: places of those tenants that have any.
            tenants: all that run or wait, two or more.
            share: of the places, for each of them.
        """
        if share < 2:  # nobody could lend
            return
        balances, most, least = self._balances, MOST * share, LEAST * share
        for tenant in tenants:
            balance = balances.get(tenant, 0) + share - having.get(tenant, 0)
            balances[tenant] = balance = max(-most, min(most, balance))
            if balance >= least:
                self._in_credit.add(tenant)
            elif balance <= 0:
                self._in_credit.discard(tenant)
        if len(balances) > len(tenants) + _MOST_REMEMBERED:
            self._balances = {tenant: balances[tenant] for tenant in tenants}
            self._in_credit &= tenants

    def loans(self, having: Mapping[str, int], waiting: Set[str], tenants: Set[str], share: int) -> dict[str, int]:
        """Places by which what a tenant may claim differs from its share: more for who borrows, fewer for who lends.

        Together they are none. A tenant borrows what it has beyond its share, and one place more if it waits.

        Args:
            waiting: those of the tenants that wait.
        """
        wanted = {
            tenant: more
            for tenant in self._in_credit
            if tenant in tenants and (more := having.get(tenant, 0) - share + (tenant in waiting)) > 0
        }
        if not wanted or share < 2:
            return {}
        lenders = sorted((balance, tenant) for tenant in tenants if (balance := self._balances.get(tenant, 0)) < 0)
        left = share // 2 * len(lenders)
        loans: dict[str, int] = {}
        for tenant in sorted(wanted, key=lambda tenant: (-self._balances[tenant], tenant)):
            loans[tenant] = min(wanted[tenant], left)
            left -= loans[tenant]
        total = sum(loans.values())
        for number, (_, tenant) in enumerate(lenders):
            loans[tenant] = -((total + len(lenders) - 1 - number) // len(lenders))
        return loans

    def check(self) -> None:
        """Assert what must always hold. For tests."""
        assert all(self._balances.get(tenant, 0) > 0 for tenant in self._in_credit), "a tenant borrows without credit"
