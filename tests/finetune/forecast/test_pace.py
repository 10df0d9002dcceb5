"""Seconds of a step before any run: counted work over measured speeds; what is kept of them, and when they are not believed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.cli import main
from finetune.config import ActivationConfig, BatchConfig, OptimizerConfig, PipelineConfig, TuneConfig, ZeroConfig
from finetune.errors import FinetuneError
from finetune.forecast import measure
from finetune.forecast.estimate import forecast, model_config_of
from finetune.forecast.facts import ModelFacts, facts_of
from finetune.forecast.layout import layout_of
from finetune.forecast.measure import Speeds, kept_speeds, measure_speeds
from finetune.forecast.pace import keep_pace, kept_pace
from finetune.forecast.seconds import parts_of, rate_at
from tests.finetune.forecast.test_forecast import config_of, hardware
from tests.finetune.support import small_run, write_config

SPEEDS = Speeds(
    products={32: 1e9, 512: 1e10},
    attention=1e9,
    plain_bytes=1e9,
    costly_bytes=5e8,
    update_bytes=2e9,
    call_seconds=1e-5,
    reduce_bytes=1e8,
    gather_bytes=2e8,
)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A cache folder of this test's own, and made-up speeds in the place of measured ones; a number for each measurement."""
    times: list[int] = []

    def pretend(here: object) -> Speeds:
        times.append(len(times))
        return SPEEDS

    monkeypatch.setenv("TESSERA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "_measure", pretend)
    return times


def facts(config: TuneConfig) -> ModelFacts:
    return facts_of(config, model_config_of(config), "fp32", on_gpu=False)


def parts(config: TuneConfig, speeds: Speeds = SPEEDS) -> dict[str, float]:
    return parts_of(facts(config), layout_of(config, device="cpu", precision="fp32"), speeds)


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
    assert found.work.attention == pytest.approx(2 * 48 * 3.5 * 4 * found.layers * found.hidden * 48 / 2)
    assert found.work.plain_bytes > 0
    assert found.work.costly_bytes > 0
    assert found.work.calls < 200 * found.layers


def test_blocks_that_are_computed_again_cost_a_forward_pass_more(tmp_path: Path) -> None:
    plain, again = (
        facts(config_of(tmp_path, activations=ActivationConfig(checkpoint=kind))).work for kind in ("none", "device")
    )
    assert 1.15 < sum(again.products.values()) / sum(plain.products.values()) < 4 / 3
    assert again.attention == pytest.approx(plain.attention * 4.5 / 3.5)
    assert again.calls > plain.calls


# -- seconds from speeds


def test_a_size_between_two_measured_ones_has_a_rate_between_theirs() -> None:
    assert rate_at(SPEEDS.products, 8) == 1e9
    assert rate_at(SPEEDS.products, 128) == pytest.approx(10**9.5)
    assert rate_at(SPEEDS.products, 4096) == 1e10


def test_each_part_of_a_step_follows_from_the_speed_that_bounds_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, zero=ZeroConfig(stage=1))
    usual = parts(config)
    for speed, names in {
        "attention": {"attention"},
        "plain_bytes": {"plain operations", "gradients"},
        "costly_bytes": {"activation functions and norms"},
        "update_bytes": {"optimizer"},
        "reduce_bytes": {"reduction"},
        "gather_bytes": {"gathering"},
    }.items():
        faster = parts(config, dataclasses.replace(SPEEDS, **{speed: 2 * getattr(SPEEDS, speed)}))
        assert faster == {name: value / 2 if name in names else value for name, value in usual.items()}


def test_micro_batches_stages_and_ranks_change_what_they_should(tmp_path: Path) -> None:
    one = parts(config_of(tmp_path, zero=ZeroConfig(stage=2)))
    two = parts(config_of(tmp_path, zero=ZeroConfig(stage=2), batch=BatchConfig(micro=2, accumulation=2)))
    assert two["products"] == 2 * one["products"]
    assert two["reduction"] == 2 * one["reduction"]
    assert two["optimizer"] == one["optimizer"]
    alone = parts(config_of(tmp_path, run={"ranks": 1}, zero=ZeroConfig(stage=2)))
    assert "reduction" not in alone
    assert alone["optimizer"] == 2 * one["optimizer"]
    gathered = parts(config_of(tmp_path, zero=ZeroConfig(stage=3)))
    assert gathered["gathering"] == 2 * one["gathering"]
    assert gathered["calls"] > one["calls"]
    muon = parts(config_of(tmp_path, zero=ZeroConfig(stage=2), optimizer=OptimizerConfig(name="muon")))
    assert muon["optimizer"] > one["optimizer"]


def test_a_pipeline_of_two_stages_halves_the_work_and_waits_once(tmp_path: Path) -> None:
    batch = BatchConfig(micro=2, accumulation=4)
    whole = config_of(tmp_path, run={"ranks": 1}, zero=ZeroConfig(stage=1), batch=batch)
    staged = config_of(tmp_path, zero=ZeroConfig(stage=1), batch=batch, pipeline=PipelineConfig(stages=2))
    found = facts(whole)
    one, two = (
        parts_of(found, layout_of(c, device="cpu", precision="fp32", command="pretrain"), SPEEDS) for c in (whole, staged)
    )
    assert two["products"] == pytest.approx(one["products"] * 5 / 8)
    assert "reduction" not in two


# -- what is kept, and when it is believed


def test_speeds_are_kept_for_such_ranks_alone(tmp_path: Path, measured: list[int]) -> None:
    config = config_of(tmp_path)
    assert kept_speeds(config, "fp32") is None
    assert measure_speeds(config, "fp32") == SPEEDS
    assert kept_speeds(config, "fp32") == SPEEDS
    assert kept_speeds(config, "bf16") is None
    assert kept_speeds(config_of(tmp_path, run={"ranks": 1}), "fp32") is None
    assert kept_speeds(config_of(tmp_path, run={"threads": 7}), "fp32") is None
    measure_speeds(config, "fp32")
    assert len(measured) == 2, "asked for, it is measured anew"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"attention": 1000000000.0', '"attention": "fast"'),
        lambda text: text.replace('"attention": 1000000000.0', '"attention": 0'),
        lambda text: text.replace('"attention": 1000000000.0', '"attention": NaN'),
        lambda text: text.replace('"torch": "', '"torch": "0.'),
        lambda text: text.replace('"call_seconds"', '"other"'),
        lambda text: '{"machine": null, "speeds": {}}',
    ],
)
def test_a_file_that_is_damaged_or_of_another_machine_is_none(
    tmp_path: Path, measured: list[int], damage: Callable[[str], str]
) -> None:
    config = config_of(tmp_path)
    measure_speeds(config, "fp32")
    (file,) = (tmp_path / "cache" / "speeds").iterdir()
    text = file.read_text(encoding="utf-8")
    file.write_text(damage(text), encoding="utf-8")
    assert file.read_text(encoding="utf-8") != text
    assert kept_speeds(config, "fp32") is None
    measure_speeds(config, "fp32")
    assert kept_speeds(config, "fp32") == SPEEDS


def test_without_a_cache_folder_speeds_serve_once(tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE_DIR", "/dev/null/cache")
    assert measure_speeds(config_of(tmp_path), "fp32") == SPEEDS
    assert kept_speeds(config_of(tmp_path), "fp32") is None


def test_described_hardware_and_gpus_have_no_speeds_of_this_machine(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    model = model_config_of(config)
    for room, known in (
        (hardware(), True),
        (hardware(described=True), False),
        (hardware(device="cuda", gpus=2, gpu_bytes=1 << 36), False),
    ):
        found = forecast(config, model, room, precision="fp32", speeds=SPEEDS)
        assert (found.pace is not None) == known


def test_the_pace_of_a_run_in_the_folder_is_believed_before_the_speeds(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    model = model_config_of(config)
    expected = forecast(config, model, hardware(), precision="fp32", speeds=SPEEDS).pace
    assert expected is not None
    assert expected.step_seconds == pytest.approx(sum(parts(config).values()))
    assert expected.tokens_per_second == pytest.approx(config.step_samples * 48 / expected.step_seconds)
    assert "measured speeds" in expected.source
    keep_pace(tmp_path, config, step_seconds=0.5, tokens_per_second=100.0)
    found = forecast(config, model, hardware(), precision="fp32", pace=kept_pace(config), speeds=SPEEDS).pace
    assert found is not None
    assert found.step_seconds == 0.5


# -- what is printed


def test_plan_offers_to_measure_then_says_from_what_the_seconds_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: list[int]
) -> None:
    assert "plan --measure measures this machine" in planned(tmp_path, capsys)
    assert measured == []
    said = planned(tmp_path, capsys, "--measure")
    for words in ("measured products: 1.0 at 32, 10.0 at 512", "GB/s added up", "s a step", "this machine's measured speeds"):
        assert words in said
    said = planned(tmp_path, capsys)
    assert "s a step" in said
    assert "measured products" not in said
    assert len(measured) == 1
    answer = json.loads(planned(tmp_path, capsys, "--measure", "--json"))
    assert answer["speeds"]["attention"] == 1e9
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
def test_ranks_measure_speeds_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE_DIR", str(tmp_path))
    config = config_of(tmp_path, run={"threads": 1})
    found = measure_speeds(config, "bf16")
    assert found.reduce_bytes is not None
    assert kept_speeds(config, "bf16") == found


def test_a_failed_measurement_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "module_command", lambda module: ["/bin/false"])
    monkeypatch.setenv("TESSERA_CACHE_DIR", str(tmp_path))
    with pytest.raises(FinetuneError, match="could not be measured"):
        measure_speeds(config_of(tmp_path), "fp32")
    assert not (tmp_path / "speeds").exists()
