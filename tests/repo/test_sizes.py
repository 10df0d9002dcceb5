"""Files and functions stay small enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from tests.repo.documents import REPOSITORY

FILE_LINES = 400
FUNCTION_LINES = 60
ROOMS = (
    *("checkpoint", "configuration", "finetune", "host", "serve", "tessera"),
    *("benchmarks", "deploy", "docs", "examples", "protos", "tests"),
)
NOT_OURS = ("serve/v1/", "tests/fixtures/")
"""Generated code, and what earlier releases wrote."""


@cache
def sources(*patterns: str) -> dict[str, str]:
    """What each of our files holds, of Python unless others are asked for."""
    places = ((REPOSITORY / room, pattern) for room in ROOMS for pattern in patterns or ("*.py",))
    files = (file for room, pattern in places for file in room.rglob(pattern))
    named = {file.relative_to(REPOSITORY).as_posix(): file for file in files}
    return {name: file.read_text(encoding="utf-8") for name, file in named.items() if not name.startswith(NOT_OURS)}


def functions(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def test_no_file_is_long() -> None:
    lengths = {name: len(source.splitlines()) for name, source in sources("*.py", "*.cpp", "*.h").items()}
    assert {name: length for name, length in lengths.items() if length > FILE_LINES} == {}


def test_no_function_is_long() -> None:
    long_enough = ((name, source) for name, source in sources().items() if source.count("\n") > FUNCTION_LINES)
    found = ((name, *function) for name, source in long_enough for function in functions(source))
    assert [(name, function, lines) for name, function, lines in found if lines > FUNCTION_LINES] == []
