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
        ("serving", "Pythia-1.4B"),
    ],
)
def test_a_row_is_what_the_program_says(program: ModuleType, kind: str, model: str) -> None:
    cells = getattr(program, f"{kind}_row")(model)
    assert f"| {' | '.join(cells)} |\n" in (DOCS / "gpu.md").read_text(encoding="utf-8")


@SLOW
def test_twin_flow_takes_no_more_than_is_worked_out_for_a_share_between_two(program: ModuleType) -> None:
    model = "Pythia-410M"
    on_host = program.needs(model, next(recipe for recipe in program.RECIPES if recipe.name == "H"))
    worked_out = dict(program.twin_flow(model, on_host))["T 0.5"]
    tree = {"zero": {"stage": 3}, "offload": {"optimizer": "cpu", "ratio": 0.5}}
    forecast = program.needs(model, program.Recipe("T", tree))
    for found, bound in ((forecast.device, worked_out.device), (forecast.host, worked_out.host)):
        assert 0.98 * bound < found < bound + (1 << 20)


def test_the_first_way_that_fits_is_told_where_it_changes_with_the_host(program: ModuleType) -> None:
    gib = program.GIB
    found = [("G", program.Needs(30 * gib, 0)), ("T 0.5", program.Needs(20 * gib, 100 * gib)), ("N", program.Needs(gib, gib))]
    assert program._fastest(found, 24.0) == "64 GB: N, 128 GB: T 0.5"
    assert program._fastest(found, 48.0) == "64 GB: G"
    assert program._fastest(found[:1], 24.0) == "–"


def test_tables_are_compared_and_written(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "gpu.md"
    page.write_text((DOCS / "gpu.md").read_text(encoding="utf-8"), encoding="utf-8")
    before = page.read_text(encoding="utf-8")
    monkeypatch.setattr(program, "PAGE", page)
    for kind in ("training", "lora", "serving"):
        table = before.partition(f"<!-- {kind}: docs/gpu_fits.py -->\n\n")[2].partition("\n<!-- end of")[0]
        monkeypatch.setattr(program, f"{kind}_table", lambda table=table: table)
    assert program.main(["--check"]) == 0
    monkeypatch.setattr(program, "lora_table", lambda: "| another |\n")
    assert program.main(["--check"]) == 1
    assert "+| another |\n" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == before
    assert program.main([]) == 0
    assert program.main(["--check"]) == 0
    assert "| another |" in page.read_text(encoding="utf-8")


def test_each_table_has_all_models(program: ModuleType) -> None:
    page = (DOCS / "gpu.md").read_text(encoding="utf-8")
    for kind in ("training", "lora", "serving"):
        table = page.partition(f"<!-- {kind}: docs/gpu_fits.py -->")[2].partition("<!-- end of")[0]
        assert [model for model in program.MODELS if f"| {model} |" in table] == list(program.MODELS)
