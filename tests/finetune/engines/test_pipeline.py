"""The pipeline learns what plain PyTorch learns, skips what is not finite, resumes exactly, and balances its stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.finetune.engines.pipeline_worker import HALF, HALF_STEPS, PARITY
from tests.finetune.engines.pipelines import MODELS
from tests.finetune.support import run_ranks

pytestmark = pytest.mark.slow

Reports = dict[int, list[dict[str, Any]]]
CASES = [(ranks, case) for ranks, cases in PARITY.items() for case in cases]
HALF_CASES = [(ranks, case) for ranks, cases in HALF.items() for case in cases]


def run_worker(out: Path, ranks: int) -> list[dict[str, Any]]:
    run_ranks("tests.finetune.engines.pipeline_worker", ranks, out, seconds=800)
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What the ranks saw, by number of ranks then by rank."""
    return {ranks: run_worker(tmp_path_factory.mktemp(f"ranks-{ranks}"), ranks) for ranks in PARITY}


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_losses_and_gradient_norms_equal_plain_pytorch(reports: Reports, ranks: int, case: str) -> None:
    report = reports[ranks][0]
    expected, seen = report["reference"][PARITY[ranks][case][0]], report["parity"][case]
    assert seen["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert seen["norms"] == pytest.approx(expected["norms"], abs=2e-5)
    assert seen["losses"][-1] < seen["losses"][0] - 0.3
    assert seen["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_new_weights_do_not_depend_on_the_stages(reports: Reports, ranks: int, case: str) -> None:
    assert reports[ranks][0]["parity"][case]["same_start"]


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_a_rank_holds_its_own_stage_alone(reports: Reports, ranks: int, case: str) -> None:
    assert all(report["parity"][case]["holds_its_stage_alone"] for report in reports[ranks])


@pytest.mark.parametrize("ranks", PARITY)
def test_all_ranks_report_the_same_steps(reports: Reports, ranks: int) -> None:
    first, *others = ({case: seen["losses"] for case, seen in report["parity"].items()} for report in reports[ranks])
    assert all(other == first for other in others)


def test_a_head_that_costs_more_than_a_stage_is_cut(reports: Reports) -> None:
    lines = reports[2][0]["parity"]["gpt2-head-in-pieces"]["layers"]
    assert "of the head" in lines[0]
    assert "of the head" in lines[1]
    assert lines[2].startswith("slowest stage: 1.04 x the mean")


@pytest.mark.parametrize("ranks", PARITY)
@pytest.mark.parametrize("case", ["zero0-fp32", "zero1-fp32", "zero1-bf16"])
def test_what_is_not_finite_never_reaches_the_weights(reports: Reports, ranks: int, case: str) -> None:
    for report in reports[ranks]:
        seen = report["not_finite"][case]
        assert seen["skipped"] == [None, "gradient", "loss", None]
        assert seen["untouched"]
        assert seen["moved_on"]
        assert seen["finite"]


@pytest.mark.parametrize(("ranks", "case"), [(2, "zero0-fp32"), (2, "zero1-fp32"), (2, "zero1-bf16"), (4, "zero1-fp32")])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(reports: Reports, ranks: int, case: str) -> None:
    seen = reports[ranks][0]["resumed"][case]
    assert seen["losses"]["resumed"] == seen["losses"]["uninterrupted"]
    assert seen["bitwise"]


@pytest.mark.parametrize(("ranks", "case"), [(2, "zero1-fp32"), (4, "zero1-fp32")])
def test_gradients_have_one_bucket(reports: Reports, ranks: int, case: str) -> None:
    for report in reports[ranks]:
        assert {*report["resumed"][case]["buckets"]} == {1}


def test_bf16_learns_as_fp32_does(reports: Reports) -> None:
    seen = reports[2][0]["resumed"]
    assert seen["zero1-bf16"]["losses"]["resumed"] == pytest.approx(seen["zero1-fp32"]["losses"]["resumed"], abs=0.03)


@pytest.mark.parametrize(("ranks", "case"), HALF_CASES)
def test_fp16_learns_what_fp32_learns(reports: Reports, ranks: int, case: str) -> None:
    expected, seen = reports[ranks][0]["reference"]["gpt2"], reports[ranks][0]["half"][case]
    assert seen["losses"] == pytest.approx(expected["losses"][:HALF_STEPS], abs=1e-3)
    assert seen["good_steps"] == HALF_STEPS
    assert seen["norm"] < 10, "logs see the gradient of the loss, not of the scaled one"
    assert 0.01 < seen["momentum"] < 0.5, "and so does the optimizer, of a gradient clipped at 0.5"


@pytest.mark.parametrize(("ranks", "case"), HALF_CASES)
def test_fp16_answers_an_overflow_on_all_ranks_and_says_where_it_began(reports: Reports, ranks: int, case: str) -> None:
    for report in reports[ranks]:
        seen = report["half"][case]
        assert seen["skipped"] == ["scale", "scale", "loss"]
        assert seen["scales"] == [2.0**59, 2.0**8, 2.0**8], "no smaller scale mends activations"
        everyday, gradient, activations = seen["diagnoses"]
        assert everyday is None, "a scale that was too large is no fault of a layer"
        assert gradient == "the gradient of transformer.h.0.mlp.c_fc.weight"
        assert activations.startswith("the output of transformer.h.2.mlp.act (")
        assert seen["untouched"]
        assert seen["good"] == [None, None]


@pytest.mark.parametrize(("ranks", "case"), HALF_CASES)
def test_fp16_resumes_bitwise_with_its_scale(reports: Reports, ranks: int, case: str) -> None:
    seen = reports[ranks][0]["half"][case]
    assert seen["bitwise"]
    assert seen["resumed_scale"] == [[2.0**8, 2]] * 2


@pytest.mark.parametrize(("ranks", "case"), HALF_CASES)
def test_what_fp16_gradients_bring_together_may_be_more_than_fp16_holds(reports: Reports, ranks: int, case: str) -> None:
    seen = reports[ranks][0]["half"][case]
    assert seen["large_sums"] is None
    assert seen["large_sums_norm"] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("where", ["one stage", "no pipeline"])
def test_an_fp16_state_goes_on_in_other_layouts(reports: Reports, where: str) -> None:
    loss, scale = reports[2][0]["half_elsewhere"][where]
    assert loss == pytest.approx(reports[2][0]["half"]["zero1"]["next_loss"], abs=1e-3)
    assert scale == [2.0**8, 2]


@pytest.mark.parametrize("where", ["one stage", "no pipeline", "back"])
def test_a_state_goes_on_in_other_layouts(reports: Reports, where: str) -> None:
    seen = reports[2][0]["elsewhere"]
    assert seen[where] == pytest.approx(seen["uninterrupted"], abs=1e-6)


def test_activations_computed_again_are_the_same_with_dropout(reports: Reports) -> None:
    seen = reports[2][0]["checkpointed"]
    assert seen["device"] == seen["cpu"] == seen["none"]
    assert seen["rows"] == pytest.approx(seen["none"], rel=1e-5)
    assert seen["whole"] == pytest.approx(seen["none"], rel=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_packed_samples_do_not_see_each_other(reports: Reports, model: str) -> None:
    seen = reports[2][0]["packed"][model]
    assert seen["packed"] == pytest.approx([seen["apart"]] * 2, abs=1e-5)


def test_shapes_may_change_from_batch_to_batch(reports: Reports) -> None:
    seen = reports[2][0]["mixed_shapes"]
    assert seen["pipeline"] == pytest.approx(seen["plain"], rel=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_transformers_opens_the_checkpoint_as_it_lies(reports: Reports, model: str) -> None:
    assert reports[2][0]["served"][model] < 1e-6
