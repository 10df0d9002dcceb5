"""Records of benchmarks: measuring a part of one again loses nothing of the others'."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import load


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run the benchmark of memory with made-up figures; its record's cells."""
    out = tmp_path / "record.json"

    def measure_memory(
        work: Path, layouts: Sequence[str], make: Callable[..., None], keep: Callable[[str, Any], None], console: Console
    ) -> None:
        """Nothing."""
        for layout in layouts:
            keep(layout, value)

    def run(figure: int, *words: str) -> dict[str, Any]:
        nonlocal value
        value = figure
        monkeypatch.setattr("sys.argv", ["load", "--memory", "--out", str(out), *words])
        assert load.main() == 0
        cells: dict[str, Any] = json.loads(out.read_text())["cells"]
        return cells

    value = 0
    monkeypatch.setattr(load, "measure_memory", measure_memory)
    return run


def test_layouts_that_are_measured_again_leave_the_others_figures_in_the_record(measure: Callable[..., dict[str, Any]]) -> None:
    assert set(measure(1).values()) == {1}
    again = measure(2, "--layouts", "ZeRO-2", "PEFT adapter")
    assert again.keys() == set(load.CASES)
    assert [name for name, figure in again.items() if figure == 2] == ["ZeRO-2", "PEFT adapter"]
    assert set(measure(3).values()) == {3}, "all of them are a record of their own"


def test_figures_of_another_machine_are_not_mixed_with_those_of_this(
    measure: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(1)
    out = tmp_path / "record.json"
    kept = json.dumps(json.loads(out.read_text()) | {"hardware": "another"})
    out.write_text(kept)
    with pytest.raises(SystemExit):
        measure(2, "--layouts", "ZeRO-2")
    assert "its hardware is 'another'" in capsys.readouterr().err
    assert out.read_text() == kept
