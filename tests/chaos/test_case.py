"""A case has its first round, and no further one once its time is over."""

from __future__ import annotations

import math
import time
from pathlib import Path

from tests.chaos.case import Field, Report


def test_a_case_has_all_its_rounds_where_it_has_time(tmp_path: Path) -> None:
    field, report = Field(tmp_path, 0), Report("none")
    assert list(field.turns(report, 3)) == [0, 1, 2]
    assert report.figures["rounds"] == 3


def test_a_case_whose_time_is_over_has_one_round(tmp_path: Path) -> None:
    field, report = Field(tmp_path, 0), Report("none")
    field.until = time.monotonic()
    assert list(field.turns(report, 3)) == [0]
    assert report.figures["rounds"] == 1


def test_a_case_ends_after_the_round_in_which_its_time_is_over(tmp_path: Path) -> None:
    field, report = Field(tmp_path, 0), Report("none")
    field.until = math.inf
    taken = []
    for number in field.turns(report, 9):
        taken.append(number)
        if number == 1:
            field.until = -math.inf
    assert taken == [0, 1]
