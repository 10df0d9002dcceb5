"""Where test files are dealt out to processes, the long ones are begun first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests import conftest
from tests.repo.documents import REPOSITORY


def test_files_that_take_longest_are_there() -> None:
    assert [name for name in conftest.LONGEST if not (REPOSITORY / name).is_file()] == []
    assert len(set(conftest.LONGEST)) == len(conftest.LONGEST)


def test_long_files_come_first_then_those_of_many_tests_each_in_one_piece() -> None:
    first, second = conftest.LONGEST[:2]
    items: list[Any] = [
        SimpleNamespace(nodeid=name)
        for name in ("tests/few.py::a", "tests/many.py::a", f"{second}::b", "tests/many.py::b", f"{first}::z", f"{second}::a")
    ]
    given = list(items)
    conftest.pytest_collection_modifyitems(SimpleNamespace(), items)  # type: ignore[arg-type]
    assert items == given, "nothing is dealt out"
    of_a_device, others = (SimpleNamespace(markexpr=of) for of in ("gpu", "not gpu and not slow"))
    conftest.pytest_collection_modifyitems(SimpleNamespace(workerinput={}, option=of_a_device), items)  # type: ignore[arg-type]
    assert items == given, "tests for a device are in an order of their own"
    conftest.pytest_collection_modifyitems(SimpleNamespace(workerinput={}, option=others), items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == [
        f"{first}::z", f"{second}::b", f"{second}::a", "tests/many.py::a", "tests/many.py::b", "tests/few.py::a",
    ]  # fmt: skip
