"""Seconds of a step before any run: counted work over measured speeds, and the prices of the run's engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.cli import main
from finetune.config import (
    ActivationConfig,
    BatchConfig,
    OffloadConfig,
    OptimizerConfig,
    PipelineConfig,
    TuneConfig,
    ZenFlowConfig,
    ZeroConfig,
)
from finetune.errors import FinetuneError
from finetune.forecast import measure
from finetune.forecast.estimate import forecast, model_config_of
from finetune.forecast.facts import ModelFacts, facts_of
from finetune.forecast.layout import layout_of
from finetune.forecast.measure import kept_speeds, measure_speeds
from finetune.forecast.pace import keep_pace, kept_pace
from finetune.forecast.seconds import is_measurable, parts_of, rate_at, seconds_of_attention
from finetune.forecast.speeds import Measured, Speeds
from finetune.forecast.trials import Prices, Trial, prices_of, trials_of
from tests.finetune.forecast.support import config_of, hardware
from tests.finetune.support import small_run, write_config

SPEEDS = Speeds(
    products={32: 1e9, 512: 1e10},
    attention={32: {128: 1e9, 1024: 1e9}, 128: {128: 1e9, 1024: 1e9}},
    plain_bytes=1e9,
    costly_bytes=5e8,
    drawn=1e7,
    call_seconds=1e-5,
    gather_bytes=2e8,
)
PRICES = Prices(computing=1.02, micro_tensor=1e-4, micro_element=1e-8, step_tensor=2e-4, step_element=3e-8)
MEASURED = Measured(speeds=SPEEDS, prices=PRICES)
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A cache folder of this test's own, and made-up figures in the place of measured ones; a number for each measurement."""
    times: list[int] = []

    def pretend(here: object, job: object) -> dict[str, Any]:
        times.append(len(times))
        return {"speeds": dataclasses.asdict(SPEEDS), "seconds": [0.5] * 8}

    monkeypatch.setenv("TESSERA_CACHE_DIR", str(tmp_path / "cache"))
    counted = facts(config_of(tmp_path))  # of the small runs, which are not what is tested here
    monkeypatch.setattr(measure, "facts_of", lambda *_, **__: counted)
    monkeypatch.setattr(measure, "_measure", pretend)
    return times


def facts(config: TuneConfig) -> ModelFacts:
    return facts_of(config, model_config_of(config), "fp32", on_gpu=False)


def parts(config: TuneConfig, measured: Measured = MEASURED) -> dict[str, float]:
    return parts_of(facts(config), layout_of(config, device="cpu", precision="fp32"), measured)


def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    tree = small_run(tmp_path, tmp_path / "run")
    main(["plan", str(write_config(tree, tmp_path / "run.yaml")), *words])
    return capsys.readouterr().out


# -- what is counted


def test_products_are_counted_as_the_models_operations(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    found = facts(config)
    squares = 12 * found.layers * found.hidden * 48
    assert sum(found.work.products.values()) == pytest.approx(2 * 48 * (found.flops_per_token(48) - squares), rel=0.02)
    heads = config.model.new["num_attention_heads"]
    expected = 2 * 48 * 3.5 * 4 * found.layers * found.hidden * 48
    assert found.work.attention == {found.hidden // heads: {48: pytest.approx(expected)}}
    assert found.work.plain_bytes > 0
    assert found.work.costly_bytes > 0
    assert found.work.calls < 200 * found.layers
    assert found.work.drawn == 0


def test_dropout_draws_a_number_for_each_element_it_looks_at(tmp_path: Path) -> None:
    found = facts(config_of(tmp_path, new={**GPT2, "attn_pdrop": 0.1}))
    tokens = 2 * 48
    assert found.work.drawn == tokens * 64 * (1 + 2 * 2) + 2 * 4 * tokens * 48


def test_blocks_that_are_computed_again_cost_a_forward_pass_more(tmp_path: Path) -> None:
    plain, again = (
        facts(config_of(tmp_path, activations=ActivationConfig(checkpoint=kind))).work for kind in ("none", "device")
    )
    assert 1.15 < sum(again.products.values()) / sum(plain.products.values()) < 4 / 3
    (size, expected), (same, found) = *plain.attention.items(), *again.attention.items()
    assert (same, found) == (size, {48: pytest.approx(expected[48] * 4.5 / 3.5)})
    assert again.calls > plain.calls


# -- seconds from speeds


def test_a_size_between_two_measured_ones_has_a_rate_between_theirs() -> None:
    assert rate_at(SPEEDS.products, 8) == 1e9
    assert rate_at(SPEEDS.products, 128) == pytest.approx(10**9.5)
    assert rate_at(SPEEDS.products, 4096) == 1e10


RATES = {32: {128: 1e9, 1024: 4e9}, 128: {128: 2e9, 1024: 8e9}}


@pytest.mark.parametrize(
    ("size", "keys", "rate"),
    [
        (32, 128, 1e9),
        (128, 1024, 8e9),
        (80, 1024, 80 / ((8e-9 + 16e-9) / 2)),  # seconds of a pair lie on a line between those of heads that were measured
        (32, 1024 * 128 * 2 / (1024 + 128), 32 / ((32e-9 + 8e-9) / 2)),  # and on one of the inverse of the keys
        (32, 1e12, 32 / (8e-9 - 24e-9 * 128 / (1024 - 128))),
        (224, 1024, 224 / 24e-9),
        (1, 1024, 1 / (8e-9 - 8e-9 * 31 / 96)),
    ],
)
def test_attention_between_measured_ones_and_beyond_takes_what_lines_through_them_say(
    size: int, keys: float, rate: float
) -> None:
    assert 1e9 / seconds_of_attention({size: {keys: 1e9}}, RATES) == pytest.approx(rate)  # type: ignore[dict-item]  # an inverse


def test_attention_takes_something_whatever_the_lines_say() -> None:
    steep = {32: {128: 1e9, 1024: 1e12}, 128: {128: 1e9, 1024: 1e12}}
    assert seconds_of_attention({32: {1 << 40: 1e9}}, steep) >= 1e9 / 1e12 / 4
    assert seconds_of_attention({32: {128: 1e9, 1024: 1e9}}, steep) == pytest.approx(1 + 1e-3)
    assert seconds_of_attention({48: {256: 2e9}}, {48: {256: 1e9}}) == pytest.approx(2.0)


def test_each_part_of_a_step_follows_from_the_speed_that_bounds_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, new=GPT2, zero=ZeroConfig(stage=1))
    usual = parts(config)
    for speed, name in {
        "plain_bytes": "plain operations",
        "costly_bytes": "activation functions and norms",
        "drawn": "random numbers",
    }.items():
        faster = dataclasses.replace(SPEEDS, **{speed: 2 * getattr(SPEEDS, speed)})
        found = parts(config, dataclasses.replace(MEASURED, speeds=faster))
        assert found == {other: value / 2 if other == name else value for other, value in usual.items()}
    llama = parts(config_of(tmp_path))
    faster = dataclasses.replace(SPEEDS, attention={32: {128: 2e9, 1024: 2e9}, 128: {128: 2e9, 1024: 2e9}})
    assert parts(config_of(tmp_path), dataclasses.replace(MEASURED, speeds=faster))["attention"] == llama["attention"] / 2


def test_an_engine_costs_by_micro_batch_and_by_step(tmp_path: Path) -> None:
    one = config_of(tmp_path, zero=ZeroConfig(stage=2))
    two = config_of(tmp_path, zero=ZeroConfig(stage=2), batch=BatchConfig(micro=2, accumulation=2))
    found = facts(one)
    assert parts(one)["gradients"] == pytest.approx(1e-4 * found.work.tensors + 1e-8 * found.trained)
    assert parts(two)["gradients"] == 2 * parts(one)["gradients"]
    assert parts(two)["update"] == parts(one)["update"] == pytest.approx(2e-4 * found.work.tensors + 3e-8 * found.trained)
    assert parts(two)["products"] == 2 * parts(one)["products"]
    assert "whole matrices" in parts(config_of(tmp_path, zero=ZeroConfig(stage=2), optimizer=OptimizerConfig(name="muon")))
    dearer = dataclasses.replace(MEASURED, prices=dataclasses.replace(PRICES, computing=2.04))
    assert parts(one, dearer)["products"] == 2 * parts(one)["products"]


def test_a_pipeline_of_two_stages_halves_the_work_and_waits_once(tmp_path: Path) -> None:
    batch = BatchConfig(micro=2, accumulation=4)
    whole = config_of(tmp_path, run={"ranks": 1}, zero=ZeroConfig(stage=1), batch=batch)
    staged = config_of(tmp_path, zero=ZeroConfig(stage=1), batch=batch, pipeline=PipelineConfig(stages=2))
    found = facts(whole)
    one, two = (
        parts_of(found, layout_of(c, device="cpu", precision="fp32", command="pretrain"), MEASURED) for c in (whole, staged)
    )
    assert two["products"] == pytest.approx(one["products"] * 5 / 8)
    assert two["update"] == pytest.approx(one["update"] / 2)


# -- prices from small runs


def test_prices_are_found_again_in_what_they_cost() -> None:
    trials = [
        Trial(
            computed=computed * accumulation,
            accumulation=accumulation,
            tensors=tensors,
            elements=elements,
            seconds=1.02 * computed * accumulation
            + accumulation * (1e-4 * tensors + 1e-8 * elements)
            + 2e-4 * tensors
            + 3e-8 * elements,
        )
        for computed, tensors, elements in ((0.1, 39, 4e6), (0.01, 93, 5e5), (0.01, 21, 1e7), (0.15, 30, 2e6))
        for accumulation in (1, 3)
    ]
    assert dataclasses.astuple(prices_of(trials)) == pytest.approx(dataclasses.astuple(PRICES), rel=0.1)


def test_no_price_is_below_nothing() -> None:
    """Steps that took less with more accumulation, as a disturbed measurement has it."""
    trials = [Trial(0.1 * number, number, 40, 1e6, 0.5 - 0.05 * number) for number in (1, 3)]
    found = dataclasses.astuple(prices_of(trials))
    assert min(found) >= 0
    assert max(found) > 0


@pytest.mark.parametrize(
    ("command", "sections"),
    [
        ("tune", {"zero": ZeroConfig(stage=3), "offload": OffloadConfig(optimizer="cpu", parameters="cpu")}),
        ("tune", {"batch": BatchConfig(micro=2, total=8), "optimizer": OptimizerConfig(name="muon")}),
        ("pretrain", {"zero": ZeroConfig(stage=0), "pipeline": PipelineConfig(stages=2)}),
    ],
)
def test_small_runs_have_the_engine_of_the_run(tmp_path: Path, command: str, sections: dict[str, Any]) -> None:
    config = config_of(tmp_path, **sections)
    for trial in trials_of(config):
        trial.check_command(command)
        assert (trial.zero, trial.offload, trial.pipeline, trial.run) == (
            config.zero,
            config.offload,
            config.pipeline,
            config.run,
        )
        assert trial.algorithm == config.algorithm
    assert {trial.accumulation for trial in trials_of(config)} == {1, 3}


def test_disks_and_an_optimizer_beside_the_steps_have_no_seconds(tmp_path: Path) -> None:
    assert is_measurable(config_of(tmp_path), "cpu")
    assert not is_measurable(config_of(tmp_path), "cuda")
    zenflow = OffloadConfig(optimizer="cpu", method="zenflow", zenflow=ZenFlowConfig())
    assert not is_measurable(config_of(tmp_path, offload=zenflow), "cpu")
    nvme = OffloadConfig(optimizer="nvme", path=str(tmp_path))
    assert not is_measurable(config_of(tmp_path, zero=ZeroConfig(stage=3), offload=nvme), "cpu")


# -- what is kept, and when it is believed


def test_speeds_are_kept_for_such_ranks_and_engines_alone(tmp_path: Path, measured: list[int]) -> None:
    config = config_of(tmp_path)
    assert kept_speeds(config, "fp32", "tune") is None
    found = measure_speeds(config, "fp32", "tune")
    assert found.speeds == SPEEDS
    assert kept_speeds(config, "fp32", "tune") == found
    assert kept_speeds(config_of(tmp_path, batch=BatchConfig(micro=3)), "fp32", "tune") == found, "of any shape"
    assert kept_speeds(config, "bf16", "tune") is None
    assert kept_speeds(config, "fp32", "pretrain") is None
    for other in ({"run": {"ranks": 1}}, {"run": {"threads": 7}}, {"zero": ZeroConfig(stage=1)}):
        assert kept_speeds(config_of(tmp_path, **other), "fp32", "tune") is None
    measure_speeds(config, "fp32", "tune")
    assert len(measured) == 2, "asked for, it is measured anew"


def test_a_file_that_is_damaged_or_of_another_machine_is_none(tmp_path: Path, measured: list[int]) -> None:
    config = config_of(tmp_path)
    found = measure_speeds(config, "fp32", "tune")
    (file,) = (tmp_path / "cache" / "speeds").iterdir()
    text = file.read_text(encoding="utf-8")
    damages: list[Callable[[str], str]] = [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"1024": 1000000000.0', '"1024": "fast"'),
        lambda text: text.replace('"1024": 1000000000.0', '"1024": 0'),
        lambda text: text.replace('"1024": 1000000000.0', '"1024": NaN'),
        lambda text: text.replace('"attention": {', '"attention": {}, "was": {'),
        lambda text: text.replace('"torch": "', '"torch": "0.'),
        lambda text: text.replace('"method": ', '"method": 1'),  # counted in another way
        lambda text: text.replace('"call_seconds"', '"other"'),
        lambda text: text.replace('"step_element": ', '"step_element": -1'),
        lambda text: '{"machine": null, "speeds": {}}',
    ]
    for damage in damages:
        assert damage(text) != text
        file.write_text(damage(text), encoding="utf-8")
        assert kept_speeds(config, "fp32", "tune") is None
    file.write_text(text, encoding="utf-8")
    assert kept_speeds(config, "fp32", "tune") == found


def test_without_a_cache_folder_speeds_serve_once(tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE_DIR", "/dev/null/cache")
    assert measure_speeds(config_of(tmp_path), "fp32", "tune").speeds == SPEEDS
    assert kept_speeds(config_of(tmp_path), "fp32", "tune") is None


def test_described_hardware_and_gpus_have_no_speeds_of_this_machine(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    model = model_config_of(config)
    for room, known in (
        (hardware(), True),
        (hardware(described=True), False),
        (hardware(device="cuda", gpus=2, gpu_bytes=1 << 36), False),
    ):
        found = forecast(config, model, room, precision="fp32", speeds=MEASURED)
        assert (found.pace is not None) == known


def test_the_pace_of_a_run_in_the_folder_is_believed_before_the_speeds(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    model = model_config_of(config)
    expected = forecast(config, model, hardware(), precision="fp32", speeds=MEASURED).pace
    assert expected is not None
    assert expected.step_seconds == pytest.approx(sum(parts(config).values()))
    assert expected.tokens_per_second == pytest.approx(config.step_samples * 48 / expected.step_seconds)
    assert "measured speeds" in expected.source
    keep_pace(tmp_path, config, step_seconds=0.5, tokens_per_second=100.0)
    found = forecast(config, model, hardware(), precision="fp32", pace=kept_pace(config), speeds=MEASURED).pace
    assert found is not None
    assert found.step_seconds == 0.5


# -- what is printed


def test_plan_offers_to_measure_then_says_from_what_the_seconds_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: list[int]
) -> None:
    assert "plan --measure measures this machine" in planned(tmp_path, capsys)
    assert measured == []
    said = planned(tmp_path, capsys, "--measure")
    for words in ("measured products: 1.0 at 32, 10.0 at 512", "GB/s collected", "s a step", "this machine's measured speeds"):
        assert words in said
    said = planned(tmp_path, capsys)
    assert "s a step" in said
    assert "measured products" not in said
    assert len(measured) == 1
    answer = json.loads(planned(tmp_path, capsys, "--measure", "--json"))
    assert answer["measured"]["speeds"]["attention"]["128"] == {"128": 1e9, "1024": 1e9}
    assert answer["pace"]["step_seconds"] > 0
    said = planned(tmp_path, capsys, "--ram-gib", "64")
    assert "not calibrated" in said
    assert "--measure" not in said


def test_plan_does_not_measure_a_machine_that_is_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: list[int]
) -> None:
    config = write_config(small_run(tmp_path, tmp_path / "run"), tmp_path / "run.yaml")
    assert main(["plan", str(config), "--measure", "--ram-gib", "64"]) == 2
    assert "--ram-gib describes another" in capsys.readouterr().err
    assert measured == []


# -- the processes that measure


@pytest.mark.slow
def test_ranks_measure_speeds_and_the_steps_of_small_runs_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE_DIR", str(tmp_path))
    config = config_of(tmp_path, run={"threads": 1}, zero=ZeroConfig(stage=1), pipeline=PipelineConfig(stages=2))
    found = measure_speeds(config, "fp32", "pretrain")
    assert found.speeds.gather_bytes is not None
    assert found.prices.computing > 0
    assert kept_speeds(config, "fp32", "pretrain") == found


def test_a_failed_measurement_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "module_command", lambda module: ["/bin/false"])
    monkeypatch.setenv("TESSERA_CACHE_DIR", str(tmp_path))
    with pytest.raises(FinetuneError, match="could not be measured"):
        measure_speeds(config_of(tmp_path), "fp32", "tune")
    assert not (tmp_path / "speeds").exists()
