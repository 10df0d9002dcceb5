"""DeepSpeed ZeRO in every stage learns what plain PyTorch learns, skips what is not finite, and resumes exactly."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune.machine import ops
from tests.finetune.engines.zero_worker import CASES, HALF, RANKS
from tests.finetune.support import run_ranks

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What the ranks saw, by rank."""
    out = tmp_path_factory.mktemp("zero")
    adam = ops.ensure(ops.CPU_ADAM, lambda _: None)
    library = str(ops.library_of(ops.CPU_ADAM)) if adam.available else ""
    run_ranks("tests.finetune.engines.zero_worker", RANKS, out, library)
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def needs_cpu_adam(reports: Reports, case: str) -> None:
    if case == "zero3-ratio" and not reports[0]["cpu_adam"]:
        pytest.skip("no compiler for DeepSpeed's CPU Adam, without which there is no ratio")


@pytest.mark.parametrize("case", [*CASES, "zero3-offload-torch"])
def test_losses_equal_plain_adamw(reports: Reports, case: str) -> None:
    needs_cpu_adam(reports, case)
    losses = reports[0]["parity"][case]["losses"]
    assert losses == pytest.approx(reports[0]["reference"], abs=1e-4)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("case", CASES)
def test_new_weights_do_not_depend_on_the_stage(reports: Reports, case: str) -> None:
    needs_cpu_adam(reports, case)
    assert reports[0]["parity"][case]["same_start"]


@pytest.mark.parametrize("case", ["zero1", "zero2", "zero2-offload"])
def test_gradients_are_reduced_where_they_lie(reports: Reports, case: str) -> None:
    for report in reports:
        seen = report["reductions"][case]
        assert max(seen["cut"]) > 1, "parts of several ranks"
        assert set(seen["made"]) == {1}, "no copy of them to join them"


@pytest.mark.parametrize(("case", "whole"), [("zero1", [True]), ("zero2", [False, False]), ("zero2-offload", [False, False])])
def test_a_bucket_is_made_when_gradients_are_moved_to_it(reports: Reports, case: str, whole: list[bool]) -> None:
    for report in reports:
        assert report["reductions"][case]["buckets"] == whole


def test_all_ranks_report_the_same_losses(reports: Reports) -> None:
    assert reports[0]["parity"] == reports[1]["parity"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", ["zero1", "zero2-offload", "zero3", "zero3-offload-all", "zero3-ratio"])
def test_what_is_not_finite_never_reaches_the_weights(reports: Reports, case: str, precision: str) -> None:
    needs_cpu_adam(reports, case)
    for report in reports:
        seen = report["not_finite"][f"{case}-{precision}"]
        assert seen["skipped"] == [None, "gradient", "loss", None]
        assert seen["untouched"]
        assert seen["moved_on"]
        assert seen["finite"]
        assert seen["diagnoses"] == [None, "the gradient of gpt_neox.embed_in.weight", None, None]
        assert seen["norm_overflow_counted_as_it_was"]
        assert seen["finite_beyond"]
        # ZeRO-3 on the device adds the squares in fp64: no overflow there, and the step is a good one.
        assert seen["norm_overflow"] == (None if case == "zero3" else "gradient")


@pytest.mark.parametrize("case", HALF)
def test_fp16_learns_what_fp32_learns(reports: Reports, case: str) -> None:
    seen = reports[0]["half"][case]
    assert seen["losses"] == pytest.approx(reports[0]["reference"][:10], rel=0.05)
    assert seen["good_steps"] == 10
    assert seen["norm"] < 100, "clipping and logs see the gradient of the loss, not of the scaled one"


@pytest.mark.parametrize("case", HALF)
def test_fp16_answers_an_overflow_and_says_where_it_began(reports: Reports, case: str) -> None:
    for report in reports:
        seen = report["half"][case]
        assert seen["skipped"] == ["scale", "scale", "loss", None]
        assert seen["scales"] == [2.0**59, 2.0**16], "no smaller scale mends activations"
        everyday, gradient, activations = seen["diagnoses"]
        assert everyday is None, "a scale that was too large is no fault of a layer"
        assert gradient == "the gradient of gpt_neox.embed_in.weight"
        assert activations.startswith("the output of gpt_neox.layers.1.mlp.act (")
        assert seen["untouched"]


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(reports: Reports) -> None:
    seen = reports[0]["resumed"]
    assert seen["losses"]["zero3-offload-all"] == seen["losses"]["uninterrupted"]
    assert seen["bitwise"]


@pytest.mark.parametrize("case", ["zero3", "zero2-offload", "zero1", "zero3-ratio"])
def test_a_run_can_be_resumed_in_another_stage(reports: Reports, case: str) -> None:
    needs_cpu_adam(reports, case)
    seen = reports[0]["resumed"]["losses"]
    assert seen[case] == pytest.approx(seen["uninterrupted"], abs=1e-5)


def test_a_save_that_fails_is_told_on_every_rank(reports: Reports) -> None:
    for report in reports:
        assert "the save of step 1 failed" in report["failing_save"]
    assert "no-such-place" in reports[0]["failing_save"]


def test_no_rank_loads_torchs_compiler(reports: Reports) -> None:
    assert [report["compiler"] for report in reports] == [False, False]


@pytest.mark.parametrize("case", ["zero2-offload", "zero3-offload-all"])
def test_pinned_memory_is_what_was_asked_for_in_whole_pages_and_changes_nothing(reports: Reports, case: str) -> None:
    for report in reports:
        seen = report["pinned"][case]
        assert seen["losses"] == report["parity"][case]["losses"]
        assert seen["same_start"]
        assert seen["whole_pages"]
        assert seen["most"] > 0
