"""The table of rules names every rule once, and proofs that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_RULES = [f"R{number}" for number in range(1, 23)] + [f"S{number}" for number in range(1, 12)]
_ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/reliability.md").read_text().splitlines()
    if re.match(r"\| [RS]\d+ \|", line)
]


def test_every_rule_has_one_row() -> None:
    assert [row[0] for row in _ROWS] == _RULES


@pytest.mark.parametrize("row", _ROWS, ids=[row[0] for row in _ROWS])
def test_each_proof_of_a_rule_exists(row: list[str]) -> None:
    assert len(row) == 5
    assert all(row[:4])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    cases = "".join(path.read_text() for path in (ROOT / "tests/chaos").glob("*.py"))
    proofs = re.findall(r"`([^`]+)`", row[3])
    assert proofs
    for proof in proofs:
        if proof.startswith("make "):
            _, target, *case = proof.split()
            assert target in targets, proof
            assert all(f'"{one.removeprefix("CASE=")}": ' in cases for one in case), proof
        else:
            file, _, name = proof.partition("::")
            functions = {
                node.name
                for node in ast.walk(ast.parse((ROOT / file).read_text()))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert name in functions, proof
