"""The scheduler's benchmark still runs; its figures are for people."""

from __future__ import annotations

import pytest

from benchmarks.scheduler import measure


@pytest.mark.parametrize(("churn", "carries"), [(False, False), (True, False), (True, True)])
def test_the_benchmark_measures_each_step(*, churn: bool, carries: bool) -> None:
    times = measure(running=4, waiting=40, steps=5, churn=churn, carries=carries)
    assert len(times) == 5
    assert all(0 < schedule < in_all for in_all, schedule in times)
