"""Every shape of the learning rate: warm-up, course, end."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.train.schedule import Schedule

SHAPES = ("constant", "linear", "cosine", "wsd", "inverse_sqrt")


@pytest.mark.parametrize("shape", SHAPES)
def test_warm_up_is_linear_and_reaches_the_peak(shape: str) -> None:
    schedule = Schedule(100, 10, 2.0, 0.1, shape, 20)
    assert [schedule.rate(step) for step in range(10)] == pytest.approx([0.2 * (step + 1) for step in range(10)])


@pytest.mark.parametrize(
    ("shape", "middle", "end"),
    [
        ("constant", 1.0, 1.0),
        ("linear", 0.1 + 0.9 * (1 - 45 / 89), 0.1),
        ("cosine", 0.1 + 0.45 * (1 + math.cos(math.pi * 45 / 89)), 0.1),
        ("wsd", 1.0, 0.1),
        ("inverse_sqrt", math.sqrt(10 / 56), math.sqrt(10 / 100)),
    ],
)
def test_each_shape_has_its_course_and_its_end(shape: str, middle: float, end: float) -> None:
    schedule = Schedule(100, 10, 1.0, 0.1, shape, 20)
    assert schedule.rate(55) == pytest.approx(middle)
    assert schedule.rate(99) == pytest.approx(end)
    assert schedule.rate(1000) == schedule.rate(99)


def test_wsd_falls_in_its_last_steps_alone() -> None:
    schedule = Schedule(100, 10, 1.0, 0.0, "wsd", 20)
    assert schedule.rate(79) == 1.0
    assert schedule.rate(89) == pytest.approx(0.5)
    assert schedule.rate(99) == 0.0


def test_inverse_sqrt_stops_at_its_floor() -> None:
    assert Schedule(10_000, 10, 1.0, 0.2, "inverse_sqrt").rate(9_999) == 0.2


@given(st.sampled_from(SHAPES), st.integers(1, 300), st.integers(0, 300), st.integers(0, 300), st.floats(0, 1))
def test_the_rate_never_leaves_its_bounds(shape: str, steps: int, warmup: int, decay: int, floor: float) -> None:
    schedule = Schedule(steps, min(warmup, steps - 1), 2.0, floor, shape, decay)
    rates = [schedule.rate(step) for step in range(steps)]
    assert all(0 <= rate <= 2.0 for rate in rates)
    after = rates[schedule.warmup_steps :]
    assert after == sorted(after, reverse=True)
    assert all(rate >= 2.0 * floor * (1 - 1e-12) for rate in after)
