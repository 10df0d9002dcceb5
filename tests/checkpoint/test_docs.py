"""What docs/checkpoint-format.md shows can be run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from checkpoint import resolve_latest

PAGE = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    script = tmp_path / "example.py"
    script.write_text(blocks[0])
    monkeypatch.chdir(tmp_path)
    assert runpy.run_path(str(script))["rows"].shape == (512, 256)
    assert runpy.run_path(str(script))["rows"].dtype == torch.bfloat16
    assert resolve_latest(tmp_path / "runs" / "my-run").name == "step-00001000"
