"""The tables of docs/gpu.md of what fits, beside the program that makes them: one row of each; all rows take minutes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_fits", DOCS / "gpu_fits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_fits"] = module
    spec.loader.exec_module(module)
    return module


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        pytest.param("training", "Pythia-1.4B", marks=SLOW),
        pytest.param("lora", "Pythia-410M", marks=SLOW),
        ("serving", "Llama-3.1-8B"),
    ],
)
def test_a_row_is_what_the_program_says(program: ModuleType, kind: str, model: str) -> None:
    cells = getattr(program, f"{kind}_row")(model)
    assert f"| {' | '.join(cells)} |\n" in (DOCS / "gpu.md").read_text(encoding="utf-8")


def test_each_table_has_all_models(program: ModuleType) -> None:
    page = (DOCS / "gpu.md").read_text(encoding="utf-8")
    for kind in ("training", "lora", "serving"):
        table = page.partition(f"<!-- {kind}: docs/gpu_fits.py -->")[2].partition("<!-- end of")[0]
        assert [model for model in program.MODELS if f"| {model} |" in table] == list(program.MODELS)
