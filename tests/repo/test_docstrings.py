"""Docstrings say what they are about by themselves, and what types are not told has its reason."""

from __future__ import annotations

import re

import pytest

from tests.repo.test_sizes import sources

PACKAGES = ("checkpoint/", "configuration/", "finetune/", "host/", "serve/", "tessera/")
BEGINNING = re.compile(r'^\s*"""((Of|Set it|Those of|The same|As above)\b|(As|Like|See) (:func:|``))')
IGNORED = re.compile(r"# type: ignore\b(?!\[[a-z, -]+\]  # \S)")


@pytest.mark.parametrize("room", PACKAGES)
def test_no_docstring_leans_on_the_name_beside_it(room: str) -> None:
    """What an editor shows of a name is its docstring alone: "Of the token." says nothing there."""
    lines = ((name, line) for name, source in sources().items() if name.startswith(room) for line in source.splitlines())
    assert [(name, line.strip()) for name, line in lines if BEGINNING.match(line)] == []


def test_every_type_that_is_ignored_has_its_kind_and_its_reason() -> None:
    rooms = (*PACKAGES, "benchmarks/", "deploy/", "docs/", "examples/", "protos/", "tests/support/")
    lines = ((name, line) for name, source in sources().items() if name.startswith(rooms) for line in source.splitlines())
    assert [(name, line.strip()) for name, line in lines if IGNORED.search(line)] == []
