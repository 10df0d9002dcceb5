"""Which tenants may have more of the places than an equal share for a while, having had fewer before."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final

MOST: Final = 128
"""What a tenant can save up, and owe: its share of the places for so many steps."""
LEAST: Final = 8
"""It lends from so many on, until nothing is left: so nobody gives a place back that it has just been given."""
_MOST_REMEMBERED: Final = 1024
"""Tenants that neither run nor wait whose accounts are kept."""


class Credit:
    """An account for each tenant, of places by steps: each step in which somebody waits adds a tenant's share of the places,
    and takes the places that it has.

    Calls come at random moments. A tenant that keeps to its share in the mean has more calls than its share of the places at
    times, and another that floods has as many as it can get at all times. What the one left to the other it gets back when it
    has use for it: while it has credit, the due of those in debt is half of their share, and what they lend is divided among
    those with credit. The account of a tenant that neither runs nor waits rests.
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

    def dues(self, tenants: Set[str], share: int) -> dict[str, int]:
        """How many places each of the tenants that run or wait may claim; ``share`` for each where nothing is lent."""
        dues = dict.fromkeys(tenants, share)
        lending = [tenant for tenant in tenants if self.owes(tenant)]
        borrowing = self._in_credit & tenants
        if not lending or not borrowing:
            return dues
        lent = share // 2
        dues |= dict.fromkeys(lending, share - lent)
        dues |= dict.fromkeys(borrowing, share + lent * len(lending) // len(borrowing))
        return dues

    def owes(self, tenant: str) -> bool:
        """Whether a tenant has had more than its share."""
        return self._balances.get(tenant, 0) < 0

    def may_borrow(self, tenant: str) -> bool:
        """Whether a tenant may have more than its share, of those that owe."""
        return tenant in self._in_credit

    def check(self) -> None:
        """Assert what must always hold. For tests."""
        assert all(self._balances.get(tenant, 0) > 0 for tenant in self._in_credit), "a tenant borrows without credit"
