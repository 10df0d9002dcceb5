"""How long before a step ends the next one is planned."""

from __future__ import annotations

import random

import pytest

from serve.engine.lead import Lead


def test_nothing_is_known_at_first_and_the_lead_is_long() -> None:
    assert Lead().seconds(between=0.001, step=0.02) == pytest.approx(0.002 + 4 * 0.001 + 0.1 * 0.02)


def test_it_is_never_longer_than_at_first_nor_nothing() -> None:
    lead = Lead()
    first = lead.seconds(0.001, 0.02)
    for _ in range(10):
        lead.learn(was_late=True)
    assert lead.seconds(0.001, 0.02) == first
    for _ in range(1000):
        lead.learn(was_late=False)
    assert lead.seconds(0.001, 0.02) == 0.0002


@pytest.mark.parametrize(("planning", "spread"), [(0.0005, 0.0), (0.0005, 0.002), (0.002, 0.001)])
def test_one_plan_of_ten_comes_late_whatever_planning_takes_and_however_steps_differ(planning: float, spread: float) -> None:
    draw, lead = random.Random(0), Lead()
    late, leads = [], []
    for _ in range(6000):
        seconds = lead.seconds(between=0.0015, step=0.015)
        is_late = planning * draw.uniform(0.8, 1.5) > seconds + draw.gauss(0.0, spread)
        lead.learn(was_late=is_late)
        late.append(is_late)
        leads.append(seconds)
    assert 0.05 < sum(late[1000:]) / 5000 < 0.15
    assert planning < sum(leads[1000:]) / 5000 < planning * 1.5 + 2.5 * spread
