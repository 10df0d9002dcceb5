"""Lion, Muon and Adafactor learn through stages what they learn in one process, and resume there and elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.finetune.engines.stage_optimizer_worker import CASES, ELSEWHERE, OPTIMIZERS, SAVED, cases_of
from tests.finetune.support import run_ranks

pytestmark = pytest.mark.slow

Reports = dict[int, list[dict[str, Any]]]
ALL = [(name, ranks, case) for name in OPTIMIZERS for ranks in CASES for case in cases_of(name, ranks)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What the ranks saw, by number of ranks then by rank."""
    found: Reports = {}
    for ranks in CASES:
        out = tmp_path_factory.mktemp(f"ranks-{ranks}")
        run_ranks("tests.finetune.engines.stage_optimizer_worker", ranks, out, seconds=800)
        found[ranks] = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    return found


@pytest.mark.parametrize(("name", "ranks", "case"), ALL)
def test_stages_learn_what_one_process_learns(reports: Reports, name: str, ranks: int, case: str) -> None:
    report = reports[ranks][0][name]
    losses = report[case]["losses"]
    assert losses == pytest.approx(report["reference"], abs=1e-5 if CASES[ranks][case][1] == "fp32" else 0.045)
    assert losses[-1] < losses[0] - 0.03
    assert all(other[name][case]["losses"] == report[case]["losses"] for other in reports[ranks])


@pytest.mark.parametrize(("name", "ranks", "case"), ALL)
def test_a_resumed_run_is_the_uninterrupted_one(reports: Reports, name: str, ranks: int, case: str) -> None:
    seen = reports[ranks][0][name][case]
    assert seen["resumed"] == seen["losses"][SAVED:]
    assert seen["bitwise"]
    tolerance = 1e-6 if CASES[ranks][case][1] == "fp32" else 0.03
    assert seen["without a pipeline"] == pytest.approx(seen["losses"][SAVED : SAVED + ELSEWHERE], abs=tolerance)
