"""A case has its first round, and no further one once its time is over."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos import case
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


def test_a_case_with_options_of_its_own_may_be_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What scripts say is asked of a server without options, which must not take the place of the one that the case has."""
    open_now: list[tuple[str, ...]] = []

    @contextmanager
    def serving(_: object, *options: str, program: object) -> Iterator[str]:
        open_now.append(options)
        yield "server"
        open_now.remove(options)

    monkeypatch.setattr(case, "serving", serving)
    monkeypatch.setattr(case, "undisturbed", lambda *_: {})
    monkeypatch.setattr(Field, "model", tmp_path)
    field = Field(tmp_path, 0)
    with field.server("--step-timeout", "3"):
        assert field.expected == {}
        assert [options[-2:] for options in open_now] == [("--step-timeout", "3")]
    field.close()
    assert open_now == []
